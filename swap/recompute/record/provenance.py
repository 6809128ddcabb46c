"""Provenance of tensors: identifies them across two runs of a layer by the operation that made them, not by address.

    origin     argument 0       line 7, result 1     the 2nd found elsewhere     a cast or copy has that of what was copied

A forward on all tokens and a recompute on some have the same origins in the same places, though not the same shapes,
and though autocast may have cast a parameter before the one and not before the other.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch
from torch.nn import Parameter

from memo.swap.storage_map import StorageMap
from memo.swap.tensor_kinds import has_storage

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "UNKNOWN",
    "Operand",
    "Origin",
    "Origins",
    "alike",
    "cast_parameter",
    "copy_of",
    "made_by_compiler",
    "operand_of",
    "same_lengths",
]


@dataclasses.dataclass(slots=True)
class Origin:
    """Origin of a storage's bytes. Made for every result of every operator, so for speed neither frozen nor keyword-only."""

    made_by: tuple[int, int]
    """Line, from 1 on, and number of the result. Line 0 made the arguments, those below 0 were found elsewhere."""
    shift: int | None = 0
    """Added to an offset in the storage this gives one that runs can compare; None where it cannot be said."""
    is_copy: bool = False
    """Of what may have lain further apart."""
    states: set[tuple[int, bool]] | None = None
    """Of what was found elsewhere: version, and whether it wanted a gradient, each time that it was used."""

    def of_result(self, tensor: torch.Tensor, number: int) -> Origin:
        """Origin of one result's storage, this being the call's."""
        shift = None if self.shift is None else self.shift - int(tensor.storage_offset())
        return Origin(self.made_by if self.is_copy else (self.made_by[0], number), shift, self.is_copy)

    def somewhere(self) -> Origin:
        """The same origin with an unknown offset."""
        return Origin(self.made_by, None)


UNKNOWN = Origin((0, -1), None)
"""Of what nobody followed."""

Operand = tuple[tuple[int, int], bool, torch.dtype, "int | None", torch.Size]
"""What a call was given: line and number of the result, whether it is a copy of that, type, offset and size."""


class Origins:
    """Provenance of the storages of one run."""

    def __init__(self) -> None:
        self._known = StorageMap(brief=True)

    def find(self, storage: torch.UntypedStorage) -> Origin | None:
        """The recorded origin."""
        found: Origin | None = self._known.find(ref(storage))
        return found

    def put(self, storage: torch.UntypedStorage, origin: Origin) -> None:
        """Records an origin."""
        self._known[storage] = origin

    def of_argument(self, tensor: torch.Tensor, number: int) -> Origin | None:
        """Origin of an argument; of several in one storage that of the first."""
        if not has_storage(tensor):
            return None
        storage = tensor.untyped_storage()
        origin = self.find(storage)
        if origin is None:
            origin = Origin((0, number))
            self.put(storage, origin)
        return origin


def operand_of(tensor: torch.Tensor, origin: Origin) -> Operand:
    """As what a call is given a tensor."""
    offset = None if origin.shift is None else int(tensor.storage_offset()) + origin.shift
    return origin.made_by, origin.is_copy, tensor.dtype, offset, tensor.size()


def copy_of(operand: Operand | None) -> Origin:
    """Origin of a copy; a view has none of its own."""
    return UNKNOWN if operand is None else Origin(operand[0], operand[3], True)


def alike(one: Operand | None, other: Operand | None, step: int) -> bool:
    """True when two runs have equal operands; lengths may differ by multiples of `step`."""
    if one is None or other is None or one[0] != other[0] or one[2] != other[2]:
        return False
    at, there = one[3], other[3]
    if at is not None and there is not None and one[1] == other[1]:
        elsewhere = one[0][0] < 0  # lies as it lay
        if not same_lengths((at,), (there,), 0 if elsewhere else step):
            return False
    return same_lengths(one[4], other[4], step)


def same_lengths(ones: Sequence[Any], others: Sequence[Any], step: int) -> bool:
    """True when lengths are equal, or differ by multiples of a step."""
    return len(ones) == len(others) and all(
        one == other or (step and (one - other) % step == 0) for one, other in zip(ones, others, strict=True)
    )


def cast_parameter(tensor: torch.Tensor) -> Parameter | None:
    """The parameter whose cast this is: what autocast finds in its cache in one run, it casts in another."""
    node = tensor.grad_fn
    if node is None or node.name() != "ToCopyBackward0":
        return None
    leaf = getattr(node.next_functions[0][0], "variable", None)
    return leaf if isinstance(leaf, Parameter) else None


def made_by_compiler(tensor: torch.Tensor) -> bool:
    """True for a result of torch.compile's, whose operators no mode sees."""
    node = tensor.grad_fn
    return node is not None and node.name().startswith("CompiledFunction")
