"""Division of one layer's modules over tensor-parallel ranks: pure data, and the modules that it is about."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping

from torch import nn


class Kind(enum.Enum):
    """Division of a module's weights."""

    COLUMN = "outputs"
    ROW = "inputs"
    EXPERTS = "columns and rows of every expert"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DividedModule:
    """Division of one module."""

    kind: Kind
    pieces: int = 1
    """Projections fused in a COLUMN one."""
    whole_outside: bool = False
    """A COLUMN one gathers its outputs, a ROW one takes its part of whole inputs."""
    weights: Mapping[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    """Parameter of EXPERTS to the dimension that is divided, and the pieces fused along it."""


class Boundary(enum.Enum):
    """Communication where a module begins, and with WHOLE where it ends."""

    ENTRY = "tokens are gathered; gradients are summed"
    WHOLE = "tokens are gathered, and divided again at the end"


@dataclasses.dataclass(slots=True, kw_only=True)
class Division:
    """Division of one layer: its modules by their names within it."""

    parts: dict[str, DividedModule]
    boundaries: dict[str, Boundary]
    scaled: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    """Module to its attributes that are proportional to the heads."""
    summed: frozenset[str] = frozenset()
    """Replicated parameters whose gradient is summed over the ranks."""
    whole: dict[str, str] = dataclasses.field(default_factory=dict)
    """Modules of the layer that stay whole, to the reason."""


def scattering(division: Division) -> set[str]:
    """Row-parallel modules that leave each rank its own tokens with sequence parallelism: outside of WHOLE modules."""
    inside = [path + "." for path, boundary in division.boundaries.items() if boundary is Boundary.WHOLE]
    return {
        path
        for path, part in division.parts.items()
        if part.kind is Kind.ROW and not any(path.startswith(one) for one in inside)
    }


def is_linear(module: nn.Module) -> bool:
    """True for a linear map of torch or of GPT-2, and none that wraps one."""
    return type(module).__name__ in ("Linear", "Conv1D") and not any(True for _ in module.children())


def is_experts(module: nn.Module) -> bool:
    """True for fused experts of transformers: parameters (experts, ...) whose forward depends on data, token by token."""
    kind = type(module)
    known = kind.__name__.endswith("Experts") and kind.__module__.startswith("transformers.")
    return known and any(p.dim() == 3 for p in module.parameters(recurse=False))


def sizes(linear: nn.Module) -> tuple[int, int]:
    """Outputs and inputs of a linear layer."""
    outputs, inputs = linear.weight.shape  # type: ignore[misc]
    return (inputs, outputs) if type(linear).__name__ == "Conv1D" else (outputs, inputs)
