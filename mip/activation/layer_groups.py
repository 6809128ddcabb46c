"""Layers that share their variables in the linear program of activation planning, and what they hold on the device."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from memo.mip.solvers import pulp

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from memo.mip.activation.memory_peaks import IntArray
    from memo.mip.inputs.profile import LayerProfile

ROWS = 8
"""Rows of the device that a solution breaks most, of each stage, which are added at once."""
MARGIN = 1e-6
"""Margin of hard budgets, in units of the largest layer's bytes; the solver tolerates violations of a tenth of it."""

Part = Any
"""An expression, a variable or a number."""


class Sharing(enum.Enum):
    """Layers of a chunk that share their variables, where all its layers are of one class."""

    UNIFORM = "all but the last two"
    INTERIOR = "all but the first and the last three"
    """Loses nothing, or next to nothing where a recompute is given bytes that autograd does not save, for which there
    is more room the earlier the layer. May treat the first and the third last layer differently for no gain."""
    NONE = "none"


def members_of(sharing: Sharing, mine: Sequence[LayerProfile], own: range) -> list[list[int]]:
    """Groups of a chunk's layers."""
    first, last = {Sharing.UNIFORM: (0, 2), Sharing.INTERIOR: (1, 3), Sharing.NONE: (0, len(own))}[sharing]
    shared = own[first : len(own) - last] if len(own) > first + last else range(0)
    if len({mine[number].name for number in shared}) > 1:
        shared = range(0)
    members = [[number] for number in own if number not in shared]
    if shared:
        members.insert(first, list(shared))
    return members


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Moved:
    """Bytes of a group's layer that go to one tier, in units of the program."""

    saved: pulp.LpAffineExpression | pulp.LpVariable | int = 0
    """As they are saved."""
    coded: pulp.LpVariable | int = 0
    """The part of them that moves as codes."""
    sent: pulp.LpAffineExpression | pulp.LpVariable | int = 0
    """As they are on links and in the tier."""


@dataclasses.dataclass(slots=True, kw_only=True)
class LayerGroup:
    """Layers of one chunk that share variables."""

    stage: int
    chunk: int
    layer: LayerProfile
    members: list[int]
    """Positions within the stage."""
    x: dict[str, pulp.LpVariable]
    host: Moved
    disk: Moved
    saved: pulp.LpAffineExpression
    recompute: pulp.LpAffineExpression
    recompute_extra_bytes: pulp.LpAffineExpression
    """G: bytes that its recompute is given and autograd does not save."""
    held: pulp.LpAffineExpression
    """H: bytes that its recompute holds at once."""
    absent: pulp.LpAffineExpression
    """A: bytes that are not there at its backward's peak."""
    encode_s: float = 0.0
    """Time of coding for each byte that moves as codes."""
    decode_s: float = 0.0

    @property
    def moves(self) -> bool:
        """Whether bytes of it may move at all."""
        return self.to_host or self.to_disk

    @property
    def to_host(self) -> bool:
        """Whether they may move to the host."""
        return not isinstance(self.host.saved, int)

    @property
    def to_disk(self) -> bool:
        """Whether they may move to a disk."""
        return not isinstance(self.disk.saved, int)

    @property
    def kept(self) -> pulp.LpAffineExpression:
        """K: saved bytes that stay."""
        return self.saved - self.host.saved - self.disk.saved

    @property
    def coded(self) -> pulp.LpAffineExpression:
        """Bytes that move as codes."""
        return self.host.coded + self.disk.coded

    def device_parts(self, byte: float) -> tuple[Part, ...]:
        """Bytes of its layer on the device in each form of `memo.mip.activation.memory_peaks`."""
        moved = self.host.saved + self.disk.saved
        return (
            self.kept,
            self.recompute_extra_bytes,
            self.saved - self.layer.least_saved_bytes / byte,
            self.layer.full_bytes / byte + self.recompute_extra_bytes - moved,
            self.held,
            self.absent,
        )


@dataclasses.dataclass(slots=True, kw_only=True)
class DeviceRows:
    """Rows (6) of one stage."""

    names: list[str]
    room: NDArray[np.float64]
    """Room of each row for what the plan decides."""
    counts: IntArray
    """Number of times that each row counts each group, by form."""
    parts: list[tuple[Part, ...]]
    """Bytes of each group's layer on the device, by form."""
    added: set[int] = dataclasses.field(default_factory=set)
    """Rows that are in the program."""

    def broken(self, excess: float) -> list[int]:
        """The rows that the solution breaks most, of those that are not in the program."""
        values = [[float(pulp.value(part) or 0.0) for part in parts] for parts in self.parts]
        over = np.einsum("rgp,gp->r", self.counts, values) - self.room - excess
        order = np.argsort(-over, kind="stable")[:ROWS]
        return [number for number in order.tolist() if over[number] > -MARGIN / 2 and number not in self.added]

    def terms(self, number: int) -> Iterator[tuple[Part, int]]:
        """The parts that a row counts."""
        for parts, counts in zip(self.parts, self.counts[number].tolist(), strict=True):
            yield from ((part, count) for part, count in zip(parts, counts, strict=True) if count)


class WeightedSum:
    """Sum of expressions with weights; PuLP's own sums copy what they have at each addition."""

    def __init__(self, constant: float = 0.0) -> None:
        self._terms: dict[pulp.LpVariable, float] = {}
        self._constant = constant

    def add(self, weight: float, part: pulp.LpAffineExpression | pulp.LpVariable | float) -> None:
        """Adds an expression, variable or number times its weight."""
        if isinstance(part, pulp.LpAffineExpression):
            self._constant += weight * part.constant
            for variable, value in part.items():
                self._terms[variable] = self._terms.get(variable, 0.0) + weight * value
        elif isinstance(part, (int, float)):
            self._constant += weight * part
        else:
            self._terms[part] = self._terms.get(part, 0.0) + weight

    def expression(self) -> pulp.LpAffineExpression:
        """The sum."""
        return pulp.LpAffineExpression(self._terms, self._constant)
