"""A saved storage of which only the first tokens rest in a tier; the others are computed again.

It owns where the parts lie: the head is what moves, the rest is written by recomputes, the last tokens first. The reload
buffer is whole, so that the parts meet in place and the saved tensor is rebuilt over it as over any other.

    source   |head|rest|head|rest|    two rows: the heads are gathered into one block, which moves
    buffer   |head|    |head|    |    with one row the reload goes straight into the buffer, beside the recompute

Gathering and scattering is work of the caller's compute stream (memo.kernels.staging). What a layer saved is gathered at
once, in one launch; it is scattered storage by storage, since each reload ends at a time of its own.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Protocol

from memo.kernels import pack_views, staging_nbytes, staging_offsets, unpack_views

if TYPE_CHECKING:
    import weakref
    from collections.abc import Callable, Iterable

    import torch

    from memo.swap.backends.protocol import Backend
    from memo.swap.engine.saved_storage import Hold

__all__ = ["Recompute", "Rows", "TokenPrefix", "TokenRange", "Wanted", "gather"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """A storage as a dense block of `rows` x tokens x `width` bytes."""

    rows: int
    width: int

    def nbytes(self, tokens: int) -> int:
        return self.rows * tokens * self.width


class TokenRange(Protocol):
    """The tokens from `first` to `stop`, which one recompute writes."""

    @property
    def first(self) -> int: ...

    @property
    def stop(self) -> int: ...


class Wanted(Protocol):
    """A saved tensor of which a recompute writes the tokens of a range."""

    @property
    def hold(self) -> weakref.ref[Hold]:
        """Of the saved storage; dead when backward is through with it."""


class Recompute(Protocol):
    """Computes again the tokens of a layer's saved storages that no tier has."""

    @property
    def together(self) -> bool:
        """Other ranks run it at the same place in their backward: nothing that differs from rank to rank may decide it."""

    def recompute(self, take: Callable[[TokenRange, Wanted, torch.Tensor], None]) -> None:
        """Computes what is not there yet; `take` gets the storage of each wanted tensor's tokens, as bytes."""


class TokenPrefix:
    """The first `first` of `tokens` tokens of a storage. `call` computes the rest."""

    __slots__ = ("_computed_from", "call", "first", "incoming", "outgoing", "rows", "tokens")

    def __init__(self, call: Recompute, rows: Rows, *, tokens: int, first: int) -> None:
        self.call = call
        self.rows = rows
        self.tokens = tokens
        self.first = first
        self._computed_from = tokens  # the reload buffer has the tokens from here on
        self.outgoing: torch.Tensor | None = None  # gathered heads, while they leave
        self.incoming: torch.Tensor | None = None  # the same on their way back

    @property
    def head_nbytes(self) -> int:
        return self.rows.nbytes(self.first)

    @property
    def filled(self) -> bool:
        """The reload buffer has all that is computed again."""
        return self._computed_from <= self.first

    @property
    def must_gather(self) -> bool:
        """What moves is in several pieces that nobody has gathered yet."""
        return self.rows.rows > 1 and self.first > 0 and self.outgoing is None

    def lacks(self, first: int) -> bool:
        """The reload buffer has not yet the tokens that a recompute from `first` on gives."""
        return self._computed_from > first

    def head(self, block: torch.Tensor) -> torch.Tensor:
        """The bytes that move, of a storage's or buffer's, as rows x tokens x width."""
        return block.view(self.rows.rows, self.tokens, self.rows.width)[:, : self.first]

    def leaving(self, source: torch.Tensor) -> torch.Tensor:
        """The heads in one piece: what was gathered, where they are not."""
        if self.rows.rows == 1:
            return source[: self.head_nbytes]
        assert self.outgoing is not None
        return self.outgoing

    def left(self) -> int:
        """Nobody needs what was gathered any more. Returns how many bytes of device memory that gives up."""
        nbytes = 0 if self.outgoing is None else self.outgoing.numel()
        self.outgoing = None
        return nbytes

    def returning(self, buffer: torch.Tensor, backend: Backend) -> torch.Tensor:
        """Where the reload writes the heads."""
        self._computed_from = self.tokens
        if self.rows.rows == 1:
            return buffer[: self.head_nbytes]
        self.incoming = backend.empty(self.head_nbytes)
        return self.incoming

    @property
    def incoming_nbytes(self) -> int:
        """Bytes of device memory that the reload takes besides its buffer."""
        return 0 if self.incoming is None else self.incoming.numel()

    def returned(self, buffer: torch.Tensor, backend: Backend) -> int:
        """The reload is over: gathered heads go to their rows. Returns as `left`."""
        nbytes = self.incoming_nbytes
        if self.incoming is not None:
            backend.compute_uses(self.incoming)
            unpack_views(self.incoming, [self.head(buffer)])
            self.incoming = None
        return nbytes

    def fill(self, buffer: torch.Tensor, part: torch.Tensor, span: TokenRange, backend: Backend) -> int:
        """Writes recomputed tokens, `part` being all bytes of their storage; the heads may be arriving meanwhile.

        Returns the number of bytes.
        """
        tail = self.part_of(buffer, span)
        if self.rows.rows == 1:
            tail.copy_(part.view(tail.shape))  # one piece
            backend.compute_uses(buffer[self.head_nbytes :])
        else:
            unpack_views(part, [tail])
            backend.compute_uses(buffer)
        self._computed_from = span.first
        return part.numel()

    def part_of(self, block: torch.Tensor, span: TokenRange) -> torch.Tensor:
        """The bytes of the tokens in `span`, as rows x tokens x width."""
        return block.view(self.rows.rows, self.tokens, self.rows.width)[:, span.first : span.stop]

    def abandon(self) -> None:
        """Nobody will ask for the rest: what would compute it, and what that holds, may go before the copy is over."""
        del self.call

    def forget(self) -> int:
        """The reload failed: its buffer is gone, and what was written into it. Returns as `left`."""
        nbytes = self.incoming_nbytes
        self._computed_from = self.tokens
        self.incoming = None
        return nbytes


def gather(leaving: Iterable[tuple[TokenPrefix, torch.Tensor]], backend: Backend) -> int:
    """Brings the heads of storages that are about to leave into one block, of which each part gets its piece.

    Returns how many bytes of device memory the pieces take.
    """
    parts = [(part, part.head(source)) for part, source in leaving]
    heads = [head for _, head in parts]
    if not heads:
        return 0
    block = backend.empty(staging_nbytes(heads))
    pack_views(heads, block)
    backend.compute_uses(block)
    for (part, _), (offset, nbytes) in zip(parts, staging_offsets(heads), strict=True):
        part.outgoing = block[offset : offset + nbytes]
    return sum(nbytes for _, nbytes in staging_offsets(heads))
