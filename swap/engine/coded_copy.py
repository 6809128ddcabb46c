"""Coded copy: the values of a saved storage that move as one-byte codes with scales (memo.kernels.codec), by choice.

It owns the coded block of one storage on its way out and on its way back. It sits between the storage and its place in a
tier, which has the size of the coded block.

    out     storage --encode, home stream--> block --> place
    back    place --> block --decode, stream that asks--> reload buffer

Backward must not depend on how far a copy out is. So once a storage is coded, whoever reads it from its source gets what
the reload would have brought (`rounded`). A storage with a NaN or an infinity is exact all the same: that is found while it
is coded, read by the host when its source is to be released (`needs_exact`), and the storage is then copied once more as it
is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from memo.kernels import VALUES, Codec, coded_error, decode, encode

if TYPE_CHECKING:
    from memo.swap.backends.protocol import Backend, Event
    from memo.swap.stats import Stats

SMALL = 8
"""A storage with at most 1/8 of the values of its layer's hidden states is never coded: statistics of norms and log-sum-exp
of attention have one value for each token, or token and head, and little is won by them."""


def can_code(tensor: torch.Tensor, nbytes: int, hidden_values: int) -> bool:
    """True if the storage of a saved tensor may move as codes.

    Args:
        tensor: the first tensor saved of it.
        nbytes: bytes of the storage.
        hidden_values: values of the hidden states that its layer was called with; 0 where it has none.
    """
    itemsize = tensor.itemsize
    return tensor.dtype in VALUES and nbytes % itemsize == 0 and 0 < hidden_values < SMALL * (nbytes // itemsize)


class CodedCopy:
    """Coded copy of one storage. Methods that end the use of a block return its bytes of device memory.

    Args:
        codec: INT8 or FP8.
        dtype: of the values in the storage.
    """

    __slots__ = ("_arriving", "_checked", "_found", "_on_host", "_target", "block", "codec", "dtype", "is_rounded")

    def __init__(self, codec: Codec, dtype: torch.dtype) -> None:
        self.codec = codec
        self.dtype = dtype
        self.block: torch.Tensor | None = None
        """The coded block until the source is released; None before it is coded."""
        self.is_rounded = False
        """The source has been replaced by what a reload would bring."""
        self._found: torch.Tensor | None = None  # number of groups that are not finite, and largest relative error
        self._on_host: torch.Tensor | None = None  # the same
        self._checked: Event | None = None  # those are there
        self._arriving: torch.Tensor | None = None
        self._target: torch.Tensor | None = None  # of the arriving block

    def nbytes(self, moving_nbytes: int) -> int:
        """Returns the bytes of the coded block of `moving_nbytes` bytes of values."""
        return self.codec.nbytes(moving_nbytes // self.dtype.itemsize)

    def encode(self, moving: torch.Tensor, backend: Backend) -> int:
        """Codes the moving bytes (uint8, one dimension) on the current stream; returns bytes of device memory taken."""
        if self.block is not None:  # of an earlier copy, which failed
            return 0
        block = backend.empty(self.nbytes(moving.numel()))
        values = moving.view(self.dtype)
        encode(values, block, self.codec)
        backend.compute_uses(block)
        self._found = found = coded_error(values, block, self.codec)
        self._on_host = found if found.device.type == "cpu" else torch.empty(2, device="cpu", pin_memory=True)
        self._on_host.copy_(found, non_blocking=True)
        self._checked = backend.compute_event()
        self.block = block  # whole: where one of these had no memory the storage is not coded
        return block.numel()

    @property
    def is_checked(self) -> bool:
        """True if `needs_exact` does not stop the host."""
        return self._checked is None or self._checked.query()

    def needs_exact(self) -> bool:
        """True if a value is not finite, or too large for a scale; the host waits until that is known."""
        if self._checked is None or self._on_host is None:
            return False
        self._checked.synchronize()
        return bool(self._on_host[0] > 0)

    def rounded(self, source: torch.Tensor, backend: Backend) -> torch.Tensor:
        """Returns a new buffer with what a reload would bring, made on the current stream: nothing is waited for.

        Args:
            source: all bytes of the storage.
            backend: is told that the current stream writes the buffer.
        """
        assert self.block is not None
        assert self._found is not None
        decoded = torch.empty_like(source)
        decode(self.block, decoded.view(self.dtype), self.codec)
        buffer = torch.where(self._found[0] > 0, source, decoded)
        backend.compute_uses(buffer)
        self.is_rounded = True
        return buffer

    def reload_target(self, target: torch.Tensor, backend: Backend) -> torch.Tensor:
        """Returns a new block that the reload writes; it will be decoded into `target` (uint8, contiguous)."""
        self._arriving = backend.empty(self.nbytes(target.numel()))
        self._target = target
        return self._arriving

    @property
    def arriving_nbytes(self) -> int:
        """Bytes of device memory that the reload takes besides its target."""
        return 0 if self._arriving is None else self._arriving.numel()

    def finish_reload(self, backend: Backend) -> int:
        """Decodes the block that has arrived, on the current stream, and ends its use."""
        if self._arriving is not None and self._target is not None:
            backend.compute_uses(self._arriving)
            decode(self._arriving, self._target.view(self.dtype), self.codec)
            backend.compute_uses(self._target)
        return self.discard()

    def discard(self) -> int:
        """Forgets a reload that failed or is released."""
        nbytes = self.arriving_nbytes
        self._arriving = self._target = None
        return nbytes

    def drop(self, stats: Stats) -> int:
        """Ends the use of the block by the copy out, and counts the error that it was found to have."""
        if self.block is None:
            return 0
        nbytes, self.block = self.block.numel(), None
        if self._on_host is not None and self.is_checked:
            stats.largest_coded_error = max(stats.largest_coded_error, float(self._on_host[1]))
        self._found = self._on_host = self._checked = None
        return nbytes
