"""Token prefix: a saved storage of which only the first tokens move to a tier; the other tokens are recomputed.

It owns the layout of both parts: the head moves, the rest is written by recomputes, the last tokens first. The reload buffer
has the size of the whole storage, so both parts are written in place and the saved tensor is rebuilt over it as over any
other.

    source   |head|rest|head|rest|    two rows: the heads are packed into one block, which moves
    buffer   |head|    |head|    |    with one row the reload goes straight into the buffer, beside the recompute

Where nothing moves and a recompute makes the storage as it was, all of it and on its home stream, what it made is the
buffer: nothing is allocated or copied.

Packing and unpacking run on the caller's compute stream (memo.kernels.staging). A layer's storages are packed in one launch
and unpacked one by one, since each reload ends at its own time.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Protocol

from memo.kernels import pack_views, staging_nbytes, staging_offsets, unpack_views

if TYPE_CHECKING:
    import weakref
    from collections.abc import Iterable

    import torch

    from memo.swap.backends.protocol import Backend
    from memo.swap.engine.saved_storage import Hold

__all__ = ["FillCallback", "Recompute", "Rows", "TokenPrefix", "TokenRange", "Wanted", "pack_prefixes"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """A storage as a dense block of `rows` x tokens x `width` bytes."""

    rows: int
    width: int

    def nbytes(self, tokens: int) -> int:
        """Bytes of `tokens` tokens in all rows."""
        return self.rows * tokens * self.width


class TokenRange(Protocol):
    """Half-open range of tokens that one recompute writes."""

    @property
    def first(self) -> int:
        """First token."""

    @property
    def stop(self) -> int:
        """Token after the last."""


class Wanted(Protocol):
    """A saved tensor of which a recompute writes a range of tokens."""

    @property
    def hold(self) -> weakref.ref[Hold]:
        """Its storage's Hold; dead when no handle is left."""


class FillCallback(Protocol):
    """Receives recomputed tokens."""

    def __call__(self, span: TokenRange, wanted: Wanted, recomputed: torch.Tensor, /, *, owned: bool = False) -> None:
        """Receives the tokens in `span` of one saved tensor; the caller's stream has written them.

        Args:
            span: the tokens.
            wanted: the saved tensor.
            recomputed: their bytes, contiguous.
            owned: `recomputed` is a storage allocated on the caller's stream that nobody writes from now on, and that
                is read on other streams only where the backend is told (`Backend.compute_uses`): the engine may keep it.
        """


class Recompute(Protocol):
    """Recompute of the tokens of a layer's saved storages that no tier has."""

    @property
    def together(self) -> bool:
        """True if it has collectives: all ranks must run it at the same place in their backward."""

    def recompute(self, take: FillCallback) -> None:
        """Computes the tokens that are still missing; `take` receives those of each wanted tensor."""


class TokenPrefix:
    """The first `first` of `tokens` tokens of a storage, and the recompute of the others.

    Blocks are one-dimensional uint8 tensors. Methods that end the use of a packed block return its bytes of device memory.

    Args:
        call: recomputes the other tokens.
        rows: layout of the storage.
        tokens: tokens of each row.
        first: tokens of each row that move.
    """

    __slots__ = ("_computed_from", "_packed", "_unpacking", "call", "first", "rows", "tokens")

    def __init__(self, call: Recompute, rows: Rows, *, tokens: int, first: int) -> None:
        self.call = call
        self.rows = rows
        self.tokens = tokens
        self.first = first
        self._computed_from = tokens  # the reload buffer has the tokens from here on
        self._packed: torch.Tensor | None = None  # heads in one block, while they are copied out
        self._unpacking: torch.Tensor | None = None  # heads in one block, while they are reloaded

    @property
    def head_nbytes(self) -> int:
        """Bytes that move."""
        return self.rows.nbytes(self.first)

    @property
    def filled(self) -> bool:
        """True if the reload buffer has all recomputed tokens."""
        return self._computed_from <= self.first

    @property
    def must_pack(self) -> bool:
        """True if the head is in several pieces that are not packed yet."""
        return self.rows.rows > 1 and self.first > 0 and self._packed is None

    def lacks(self, first: int) -> bool:
        """True if the reload buffer does not have the tokens from `first` on yet."""
        return self._computed_from > first

    def is_all(self, span: TokenRange) -> bool:
        """True if nothing moves and `span` is all tokens."""
        return self.first == 0 and span.first == 0 and span.stop == self.tokens

    def adopted(self) -> int:
        """Records that a recompute's own memory is the reload buffer; returns its bytes."""
        self._computed_from = 0
        return self.rows.nbytes(self.tokens)

    def head(self, block: torch.Tensor) -> torch.Tensor:
        """View of the moving bytes of a source or reload buffer, as rows x tokens x width."""
        return block.view(self.rows.rows, self.tokens, self.rows.width)[:, : self.first]

    def packed(self, source: torch.Tensor) -> torch.Tensor:
        """Returns the head in one piece: of `source`, or packed by `pack_prefixes` before."""
        if self.rows.rows == 1:
            return source[: self.head_nbytes]
        assert self._packed is not None
        return self._packed

    def drop_packed(self) -> int:
        """Ends the use of the packed head by the copy out."""
        nbytes = 0 if self._packed is None else self._packed.numel()
        self._packed = None
        return nbytes

    def reload_target(self, buffer: torch.Tensor, backend: Backend) -> torch.Tensor:
        """Returns the block that the reload writes: a part of `buffer`, or a new block to be unpacked."""
        self._computed_from = self.tokens
        if self.rows.rows == 1:
            return buffer[: self.head_nbytes]
        self._unpacking = backend.empty(self.head_nbytes)
        return self._unpacking

    @property
    def unpacking_nbytes(self) -> int:
        """Bytes of device memory that the reload takes besides its buffer."""
        return 0 if self._unpacking is None else self._unpacking.numel()

    def finish_reload(self, buffer: torch.Tensor, backend: Backend) -> int:
        """Unpacks a reloaded head into the rows of `buffer`, and ends the use of its block."""
        nbytes = self.unpacking_nbytes
        if self._unpacking is not None:
            backend.compute_uses(self._unpacking)
            unpack_views(self._unpacking, [self.head(buffer)])
            self._unpacking = None
        return nbytes

    def fill(self, buffer: torch.Tensor, recomputed: torch.Tensor, span: TokenRange, backend: Backend) -> int:
        """Writes recomputed tokens into a reload buffer, to which the head may still be copied.

        Args:
            buffer: the reload buffer.
            recomputed: all bytes of the tokens in `span`, contiguous.
            span: the tokens.
            backend: is told that the caller's stream uses the buffer.

        Returns:
            Number of bytes written.
        """
        if self.rows.rows == 1:  # one piece
            target = buffer[self.rows.nbytes(span.first) : self.rows.nbytes(span.stop)]
            target.copy_(recomputed.view(-1))
            backend.compute_uses(target)
        else:
            unpack_views(recomputed, [self.part_of(buffer, span)])
            backend.compute_uses(buffer)
        self._computed_from = span.first
        return recomputed.numel()

    def part_of(self, block: torch.Tensor, span: TokenRange) -> torch.Tensor:
        """View of the bytes of the tokens in `span`, as rows x tokens x width."""
        return block.view(self.rows.rows, self.tokens, self.rows.width)[:, span.first : span.stop]

    def abandon(self) -> None:
        """Drops the recompute, and all that it holds, of a storage without handles; its copy may still be running."""
        del self.call

    def discard(self) -> int:
        """Forgets a reload buffer that failed or is released, and ends the use of a block to be unpacked."""
        nbytes = self.unpacking_nbytes
        self._computed_from = self.tokens
        self._unpacking = None
        return nbytes

    def take_packed(self, block: torch.Tensor) -> None:
        """Sets the packed head."""
        self._packed = block


def pack_prefixes(leaving: Iterable[tuple[TokenPrefix, torch.Tensor]], backend: Backend) -> int:
    """Packs the heads of source storages into one new block, in one launch; each prefix gets its piece of it.

    Returns:
        Bytes of device memory that the pieces take.
    """
    prefixes = [(prefix, prefix.head(source)) for prefix, source in leaving]
    heads = [head for _, head in prefixes]
    if not heads:
        return 0
    block = backend.empty(staging_nbytes(heads))
    pack_views(heads, block)
    backend.compute_uses(block)
    for (prefix, _), (offset, nbytes) in zip(prefixes, staging_offsets(heads), strict=True):
        prefix.take_packed(block[offset : offset + nbytes])
    return sum(nbytes for _, nbytes in staging_offsets(heads))
