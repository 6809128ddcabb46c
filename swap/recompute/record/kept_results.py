"""Results of a layer's forward that SAVE_MATMULS need not compute again.

They are those of matrix products, of token-local functions, and of torch's own collectives and the copies around them.

A product's result is a token-wise tensor. Where autograd saves its storage anyway, SAVE_MATMULS moves that storage up
to the end of its range instead of the first range's, and a recompute takes its part of it; where not, a copy of the
range alone is saved besides.

A product that such functions alone read, whose results together are no larger, is passed on: theirs are kept in its
place, or those of the functions that read them. So a tensor-parallel rank keeps its shard of a sum and not its partial
sums of all shards, and nobody sums again. keep_or_repeat.py decides what becomes of each result.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from memo.swap.engine.saved_storage import content_of
from memo.swap.recompute.axis.token_axis import Axis, cut

if TYPE_CHECKING:
    from memo.swap.engine.engine import Engine
    from memo.swap.engine.handles import Handle, Kept, Sharded
    from memo.swap.engine.saved_storage import SavedStorage

__all__ = ["Reader", "Result"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """Something that uses the numbers of a result; a view does not."""

    position: int
    """How many tensors autograd had saved before."""
    result: Result | None
    """What the reader made of them, where that is such a result itself."""


class Result:
    """One result of a forward, at `line` of its operator log, after autograd had saved `position` tensors.

    `function` is the token-local function or collective that returned it (None for a product), `source` the result that the
    function was given. Without an axis (a product of parameters alone, or one in which tokens mix, which nothing saved comes
    from) it is computed again. `span` is the range of tokens at SAVE_MATMULS, which may be empty.
    """

    def __init__(
        self,
        out: torch.Tensor,
        axis: Axis | None,
        *,
        position: int,
        span: tuple[int, int],
        tokens: int,
        line: int,
        function: Callable[..., Any] | None = None,
        source: Result | None = None,
    ) -> None:
        self.axis = axis
        self.position = position
        self.line = line
        self.function = function
        self.readers: list[Reader] = []
        self.bytes_per_token = out.numel() * out.itemsize / tokens
        self._source = None if source is None else weakref.ref(source)  # which knows its readers
        self._span = span
        self._tokens = tokens
        self._storage = weakref.ref(out.untyped_storage())
        self._content = content_of(out)
        self._needs_grad = out.requires_grad
        self._size, self._stride, self._dtype = out.size(), out.stride(), out.dtype
        self._offset = out.storage_offset()
        self._device = out.device
        self._result: torch.Tensor | None = None
        self._copy: torch.Tensor | None = None
        self._is_part = False
        self._is_changed = False
        self._handle: Handle | Kept | Sharded | None = None

    def read(self, tensor: torch.Tensor, reader: Reader) -> None:
        """`reader` uses `tensor`, which is the result or a view of it."""
        self.readers.append(reader)
        if tensor.dtype is not self._dtype:
            self.axis = self._result = None  # its bytes taken for something else: it is computed again
        # Nothing is held for a reader whose own result is kept: partial sums go when they are summed.
        if self._result is None and self._span[0] < self._span[1] and self.can_be_kept and not self.is_passed_on:
            self._result = tensor.detach().as_strided(self._size, self._stride, self._offset)

    @property
    def is_passed_on(self) -> bool:
        """True for a result in whose place those of its readers, all of them functions, can be kept."""
        if not self.can_be_kept:
            return False
        made = {reader.result for reader in self.readers}  # one may read several parts
        return (
            all(result is not None and result.function is not None and result.axis is not None for result in made)
            and sum(result.bytes_per_token for result in made if result is not None) <= self.bytes_per_token
        )

    @property
    def can_be_kept(self) -> bool:
        """True for a product with a token axis, and a function's result whose source is passed on."""
        if self.axis is None or self.function is None:
            return self.axis is not None
        source = None if self._source is None else self._source()
        return source is not None and source.is_passed_on

    def saved_in(self, engine: Engine) -> SavedStorage | None:
        """The saved storage that holds the result, if autograd saved it as it was."""
        storage = self._storage()
        saved = None if storage is None or not self.can_be_kept or self._is_changed else engine.saved_as(storage)
        return saved if saved is not None and saved.content == self._content else None

    def before_change_of(self, storage: torch.UntypedStorage) -> None:
        """The layer is about to change a storage in place: the result, if that is where it is, is copied first."""
        if self._result is not None and self._copy is None and self._storage() is storage:
            self._copy = self._cut(self._result).clone()
            self._is_changed = True

    def store(self, engine: Engine) -> None:
        """Packs the tokens of its span, so that they move to the engine's tiers."""
        assert self._result is not None
        result, self._result = self._result, None
        if self._copy is None and self.saved_in(engine) is not None:
            self._handle = engine.pack(result)
            return
        part = self._cut(result).contiguous() if self._copy is None else self._copy
        if part.untyped_storage().nbytes() > part.numel() * part.itemsize:
            part = part.clone()  # it must not keep the whole alive
        self._handle, self._copy = engine.pack(part), None
        self._is_part = True

    def give(self, engine: Engine) -> torch.Tensor:
        """The result for the tokens in the span, as a computation on those alone would lay it out."""
        assert self._handle is not None
        result = engine.unpack(self._handle, by_backward=False).detach()
        if not self._is_part:
            result = self._cut(result)
        elif self._is_changed:
            result = result.clone()
        return result.requires_grad_(self._needs_grad)

    def empty(self) -> torch.Tensor:
        """Memory for what `give` would give."""
        form = torch.empty_strided(self._size, self._stride, dtype=self._dtype, device="meta")
        part = torch.empty_like(self._cut(form), device=self._device)
        return part.requires_grad_(self._needs_grad)

    def drop(self) -> None:
        """Releases the result."""
        self._result = self._copy = None

    def _cut(self, result: torch.Tensor) -> torch.Tensor:
        assert self.axis is not None
        return cut(result, self.axis, *self._span, self._tokens)
