"""Token axis: the positions of tokens in a tensor's dimensions and in its storage's bytes.

A layer call has `tokens` tokens in a row. An `Axis` says which dimension of a tensor runs over them, `Rows` how a
storage is divided by them. All of it is exact arithmetic on shapes and strides.

    storage = rows x tokens x width bytes        (2, s, h) contiguous: 2 rows; (b, heads, s, d): b * heads rows
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
from typing import TYPE_CHECKING

from memo.swap.engine.token_prefix import Rows

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

__all__ = [
    "MIXED",
    "SAME",
    "Axis",
    "Layout",
    "Mark",
    "Meaning",
    "cut",
    "layout_of_part",
    "part_layout",
    "regroup",
    "rows_by_strides",
    "rows_of",
]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """Dimension `dim` runs over outer x tokens x inner: entry (o * tokens + t) * inner + i belongs to token t."""

    dim: int
    outer: int = 1
    inner: int = 1

    def length(self, tokens: int) -> int:
        """Size of the dimension."""
        return self.outer * tokens * self.inner

    def at(self, dim: int) -> Axis:
        """Returns the axis as another dimension."""
        return dataclasses.replace(self, dim=dim)

    def joined(self, ranks: int) -> Axis:
        """Axis of the concatenated shards of `ranks` ranks, each with the same number of tokens of its own."""
        return dataclasses.replace(self, outer=self.outer * ranks)

    def divided(self, ranks: int) -> Axis | None:
        """Axis of one rank's shard of this dimension; None where shards are not of whole rows of tokens."""
        return dataclasses.replace(self, outer=self.outer // ranks) if self.outer % ranks == 0 else None


class Mark(enum.Enum):
    """Kind of a tensor without a token axis."""

    __hash__ = object.__hash__  # its own looks up a name in Python

    SAME = "the same whatever tokens are computed: a parameter, a constant, or made of such"
    MIXED = "each element may depend on any token, or nobody knows"


Meaning = Axis | Mark

_MOST_SEEN = 10_000  # tensors lie as they did in the layer and the step before, but not over ever new sequence lengths

# An attribute of an enumeration costs more to look up than a tensor's meaning.
SAME = Mark.SAME
MIXED = Mark.MIXED


def regroup(shape: Sequence[int], axis: Axis, new: Sequence[int], tokens: int) -> Axis | None:
    """The axis after a view from `shape` to `new`, which keeps the order of elements; None when no dimension holds it."""
    step = axis.inner * math.prod(shape[axis.dim + 1 :])  # elements from one token to the next
    after = 1
    for dim in range(len(new) - 1, -1, -1):
        block = after * new[dim]
        if after and step % after == 0 and block and block % (step * tokens) == 0:
            return Axis(dim=dim, outer=block // (step * tokens), inner=step // after)
        after = block
    return None


def rows_of(tensor: torch.Tensor, axis: Axis, tokens: int) -> Rows | None:
    """Division of the tensor's storage by tokens; None unless the strides prove every byte range."""
    nbytes = tensor.untyped_storage().nbytes()
    return rows_by_strides(
        tensor.storage_offset(), tensor.size(), tensor.stride(), tensor.itemsize, nbytes, axis=axis, tokens=tokens
    )


@functools.lru_cache(_MOST_SEEN)
def rows_by_strides(
    offset: int, size: Sequence[int], stride: Sequence[int], itemsize: int, nbytes: int, *, axis: Axis, tokens: int
) -> Rows | None:
    """`rows_of` a tensor of that geometry, in elements, over a storage of `nbytes`."""
    step = stride[axis.dim] * axis.inner
    if step <= 0 or nbytes == 0 or nbytes % (tokens * step * itemsize) or offset // step % tokens:
        return None
    within = offset % step
    others = [(size[dim], stride[dim]) for dim in range(len(size)) if dim != axis.dim]
    for count, distance in (*others, (axis.inner, stride[axis.dim])):
        if count == 1 or distance % (step * tokens) == 0:
            continue  # stays where it is, or goes from row to row
        if distance >= step:
            return None
        within += (count - 1) * distance
    return Rows(rows=nbytes // (tokens * step * itemsize), width=step * itemsize) if within < step else None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Shape, strides and offset of a tensor."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def fits(self, tensor: torch.Tensor) -> bool:
        """True when `tensor` lies so; the stride of a dimension of size one says nothing."""
        pairs = zip(self.shape, self.stride, tensor.stride(), strict=True)
        return (
            tuple(tensor.shape) == self.shape
            and tensor.storage_offset() == self.offset
            and all(size == 1 or ours == theirs for size, ours, theirs in pairs)
        )


def layout_of_part(tensor: torch.Tensor, axis: Axis, rows: Rows, count: int, tokens: int) -> Layout:
    """Layout of `tensor` in a forward over `count` tokens alone, in a storage of its own."""
    offset = int(tensor.storage_offset())
    step = rows.width // tensor.itemsize
    return part_layout(offset, tensor.size(), tensor.stride(), step, axis=axis, count=count, tokens=tokens)


@functools.lru_cache(_MOST_SEEN)
def part_layout(
    offset: int, size: Sequence[int], stride: Sequence[int], step: int, *, axis: Axis, count: int, tokens: int
) -> Layout:
    """`layout_of_part` of a tensor of that geometry; `step` is the elements of one token in one row of its storage."""
    shape = list(size)
    shape[axis.dim] = axis.length(count)
    parts = [s // (step * tokens) * (step * count) if s % (step * tokens) == 0 else s for s in stride]
    row, within = divmod(offset, step * tokens)
    return Layout(shape=tuple(shape), stride=tuple(parts), offset=row * step * count + within)


def cut(tensor: torch.Tensor, axis: Axis, first: int, stop: int, tokens: int) -> torch.Tensor:
    """The tokens from `first` to `stop`, laid out in memory as a forward over those tokens alone would have them."""
    count = stop - first
    rows = rows_of(tensor, axis, tokens)
    if rows is None:
        shape = list(tensor.size())
        shape[axis.dim] = axis.length(count)
        parts = tensor.unflatten(axis.dim, (axis.outer, tokens, axis.inner))
        part: torch.Tensor = parts.narrow(axis.dim + 1, first, count).reshape(shape)
        return part
    step = rows.width // tensor.itemsize
    block = tensor.as_strided((rows.rows, count, step), (step * tokens, step, 1), first * step)
    if rows.rows > 1:
        block = block.contiguous()
    lies = layout_of_part(tensor, axis, rows, count, tokens)
    return block.as_strided(lies.shape, lies.stride, block.storage_offset() + lies.offset)
