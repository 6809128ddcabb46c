"""Replay of token ranges: runs one span of a plan in backward, piece by piece, the last tokens first.

What is kept is cut to the tokens of a piece as a computation on those tokens alone would have it: of what autograd saved or
the layer was given from the whole, of what is held besides from the span's own part.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from memo.errors import SwapError
from memo.kernels import pack_mask, unpack_mask
from memo.swap.recompute.axis.token_axis import Layout
from memo.swap.recompute.ranges.ranged_plan import Piece, Span
from memo.swap.recompute.tape.plan import mask_of
from memo.swap.recompute.tape.replay import Replay, ReplayFailed

if TYPE_CHECKING:
    from memo.swap.engine.engine import Engine
    from memo.swap.engine.token_prefix import FillCallback, Rows
    from memo.swap.recompute.axis.token_axis import Axis
    from memo.swap.recompute.ranges.rows import TokenRows
    from memo.swap.recompute.tape.plan import Kept
    from memo.swap.recompute.tape.replay import Brought, Wanted

__all__ = ["RangedReplay", "Slice", "part_to_keep", "slices_of"]

MOST_SPANS = 1024
"""Spans of which the slices are remembered."""

TakePart = Callable[[Piece, "Wanted", torch.Tensor], None]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Slice:
    """Tokens of something kept that are packed, and how they lie."""

    first: int
    count: int
    rows: Rows | None = None
    """Rows of a storage; None for one that is the same for all tokens."""
    bits: tuple[tuple[int, ...], Axis] | None = None
    """Sizes of the whole tensor of zeros and ones, and its axis."""


def _slice_of(rows: TokenRows, span: Span, kept: Kept, *, is_whole: bool) -> Slice:
    """What is packed of something kept: the tokens of the span, or all of them where it `is_whole` there anyway."""
    tape = rows.tape
    if kept.bits_of >= 0:
        content = next(at for at in tape.steps[kept.bits_of].makes if tape.contents[at].storage == kept.storage)
        use = mask_of(tape, content)
        assert use is not None
        axis = rows.axes.get((use.value, use.content))
        if axis is None:  # as of stochastic depth: all tokens read the same zeros and ones
            return Slice(first=0, count=rows.tokens)
        return Slice(first=span.first, count=span.stop - span.first, bits=(tuple(tape.geometry(use.value)[2]), axis))
    division = rows.rows.get(tape.last[kept.storage])
    if is_whole or division is None:
        return Slice(first=0, count=rows.tokens, rows=division)
    return Slice(first=span.first, count=span.stop - span.first, rows=division)


@functools.lru_cache(maxsize=MOST_SPANS)
def slices_of(span: Span, whole: frozenset[int]) -> tuple[Slice, ...]:
    """What is packed of all that a span keeps; storages of `whole` are there anyway."""
    return tuple(_slice_of(span.rows, span, kept, is_whole=kept.storage in whole) for kept in span.plan.kept)


def part_to_keep(tensor: torch.Tensor, part: Slice, tokens: int) -> torch.Tensor:
    """The tokens of a slice in memory of their own; the tensor itself where all of it is kept."""
    if part.count == tokens:
        return tensor
    if part.bits is not None:
        size, axis = part.bits
        mask = unpack_mask(tensor, torch.empty(_parted(size, axis, tokens), dtype=torch.bool, device=tensor.device))
        return pack_mask(mask.narrow(axis.dim + 1, part.first, part.count).contiguous())
    assert part.rows is not None
    block = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    lies = block.view(part.rows.rows, tokens, part.rows.width)
    return lies[:, part.first : part.first + part.count].clone(memory_format=torch.contiguous_format).view(-1)


def _parted(size: Sequence[int], axis: Axis, count: int) -> list[int]:
    """Sizes with `count` tokens, which have a dimension of their own: that after `axis.dim`."""
    return [*size[: axis.dim], axis.outer, count, axis.inner, *size[axis.dim + 1 :]]


def _bits_of(bits: torch.Tensor, size: Sequence[int], dim: int, first: int, count: int) -> torch.Tensor:
    """The bits of `count` tokens from `first` on, of zeros and ones of that size with the tokens in `dim`."""
    width = math.prod(size[dim + 1 :])
    if all(tokens * width % 8 == 0 for tokens in (size[dim], first, count)):
        lies = bits[: math.prod(size) // 8].view(-1, size[dim] * width // 8)
        return lies[:, first * width // 8 : (first + count) * width // 8].reshape(-1)
    whole = unpack_mask(bits, torch.empty(size, dtype=torch.bool, device=bits.device))
    return pack_mask(whole.narrow(dim, first, count).contiguous())


class RangedReplay(Replay):
    """The steps that one span of a layer call has to run again.

    Args:
        engine: brings back what is kept.
        name: of the layer, for messages.
        span: which tokens, and which steps.
        kept: what the span keeps, in its order.
        slices: the tokens of each of them that are packed.
        carried: arguments of the call that the plan does not hold.
        precision: of products, where the call began.
        wanted: storages that it gives, in the plan's order.
        before: replay that runs first, of the tokens behind or of another phase.
        together: other ranks run it at the same place in their backward.
        verify: sums the bytes of what is kept now, and again when they are read.
    """

    def __init__(
        self,
        engine: Engine,
        name: str,
        span: Span,
        kept: Sequence[Brought],
        slices: Sequence[Slice],
        *,
        carried: Sequence[Any],
        precision: tuple[Any, ...],
        wanted: Sequence[Wanted],
        before: Replay | None = None,
        together: bool = False,
        verify: bool = False,
    ) -> None:
        super().__init__(
            engine,
            name,
            span.plan,
            kept,
            carried=carried,
            precision=precision,
            wanted=wanted,
            before=before,
            together=together,
            verify=verify,
        )
        self.span = span
        self._slices = slices

    def recompute(self, take: FillCallback) -> None:
        """Runs the pieces that are not in place; `take` gets the bytes of each wanted storage.

        Raises:
            ModifiedAfterSave: what is kept was changed in place since the forward.
            SwapError: it could not run.
        """
        if self.before is not None:
            self.before.recompute(take)
        with self._lock:
            for piece in self.span.pieces:
                if self._has(piece):
                    continue
                try:
                    self._run_piece(piece, take)
                except ReplayFailed as failure:
                    raise SwapError(f"{self.name} could not be recomputed: {failure}") from failure.__cause__

    def run(self, take: TakePart) -> None:
        """Runs all pieces, even where they are in place already; see `Replay.run`."""
        for piece in self.span.pieces:
            self._run_piece(piece, take)

    def _has(self, piece: Piece) -> bool:
        """True when all that backward may still read of a piece is in place."""
        holds = (want.hold() for want in self.wanted)
        parts = (hold.saved.prefix for hold in holds if hold is not None and hold.saved.source is None)
        return not any(part.lacks(piece.first) for part in parts if part is not None)

    def _run_piece(self, piece: Piece, take: TakePart) -> None:
        count, rows, names = piece.stop - piece.first, self.span.rows, self.plan.wanted
        blank = torch.empty(0, dtype=torch.uint8, device=self._engine.backend.device)

        def bring(position: int) -> torch.Tensor:
            return self._part(position, piece)

        def give(position: int, made: torch.Tensor, lies: tuple[int, Any, Any] | None) -> None:
            want, storage = self.wanted[position], made.untyped_storage()
            division = rows.rows[rows.tape.last[names[position]]]
            if storage.nbytes() != division.nbytes(count):
                raise ReplayFailed(None, f"it made {storage.nbytes()} bytes of {count} tokens")
            is_as_told = lies is None or (made.storage_offset(), made.size(), made.stride()) == lies
            if (
                lies is not None
                and not is_as_told
                and not Layout(offset=lies[0], shape=lies[1], stride=lies[2]).fits(made)
            ):
                raise ReplayFailed(None, f"it laid a tensor of {count} tokens out in memory in another way")
            block = blank if made.device == blank.device else made.new_empty(0, dtype=torch.uint8)
            take(piece, want, block.new(storage))  # all of its bytes

        self._run(self.span.plan_for(count, piece.first), bring, give)

    def _part(self, position: int, piece: Piece) -> torch.Tensor:
        """The tokens of a piece, of what the plan keeps at `position`: bytes, or bits."""
        tensor, part = self._bring(position), self._slices[position]
        first, count = piece.first - part.first, piece.stop - piece.first
        if part.bits is not None:
            return _bits_of(tensor, _parted(*part.bits, part.count), part.bits[1].dim + 1, first, count)
        block = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        if part.rows is None:
            return block
        if part.rows.rows == 1:
            return block[first * part.rows.width : (first + count) * part.rows.width]
        block = block[: part.rows.nbytes(part.count)]
        return block.view(part.rows.rows, part.count, part.rows.width)[:, first : first + count].reshape(-1)
