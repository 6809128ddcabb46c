"""Results of a layer's matrix products, which the middle level does not compute again.

A product's result is a token-wise tensor. Where autograd saves its storage anyway, the middle level moves that storage up
to the end of its range instead of the first range's, and a recompute takes its part of it; where not, a copy of the
range alone is saved besides. Products that nothing needed comes after, the last projection first of all, are not kept.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

from memo.swap.tokens import Axis, cut

if TYPE_CHECKING:
    from memo.swap.engine import Engine
    from memo.swap.saved import Handle, Kept, SavedStorage, Sharded

__all__ = ["Product", "is_product"]

_ATEN = torch.ops.aten
_PRODUCTS = frozenset({_ATEN.mm, _ATEN.addmm, _ATEN.bmm, _ATEN.linear})


def is_product(func: torch._ops.OpOverload) -> bool:
    """True for the matrix products that have a rule for tokens (tokenrules)."""
    return func.overloadpacket in _PRODUCTS


class Product:
    """One matrix product of a forward; `position` is how many tensors autograd had saved before it.

    Without an axis (a product of parameters alone, or one in which tokens mix, which nothing saved comes from) it is
    computed again. `span` is the range that the middle level has, and empty where it has none.
    """

    def __init__(
        self, out: torch.Tensor, axis: Axis | None, *, position: int, span: tuple[int, int], tokens: int
    ) -> None:
        self.axis = axis
        self.position = position
        self._span = span
        self._tokens = tokens
        self._storage = weakref.ref(out.untyped_storage())
        self._version = out._version
        self.bytes_per_token = out.numel() * out.itemsize / tokens
        self._result = out.detach() if axis is not None and span[0] < span[1] else None
        self._copy: torch.Tensor | None = None
        self._is_part = False
        self._is_changed = False
        self._handle: Handle | Kept | Sharded | None = None

    def saved_in(self, engine: Engine) -> SavedStorage | None:
        """The saved storage that holds the result, if autograd saved it as it was."""
        storage = self._storage()
        saved = None if storage is None or self.axis is None or self._is_changed else engine.saved_as(storage)
        return saved if saved is not None and saved.version == self._version else None

    def before_change_of(self, storage: torch.UntypedStorage) -> None:
        """The layer is about to change a storage in place: the result, if that is where it is, is copied first."""
        if self._result is not None and self._copy is None and self._storage() is storage:
            self._copy = self._cut(self._result).clone()
            self._is_changed = True

    def store(self, engine: Engine) -> None:
        """Hands what the middle level needs to the engine's tiers."""
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
        """The result for the tokens in the span, as a product of those alone would lay it out."""
        assert self._handle is not None
        result = engine.unpack(self._handle, by_backward=False).detach()
        if not self._is_part:
            return self._cut(result)
        return result.clone() if self._is_changed else result

    def drop(self) -> None:
        """It is not needed."""
        self._result = self._copy = None

    def _cut(self, result: torch.Tensor) -> torch.Tensor:
        assert self.axis is not None
        return cut(result, self.axis, *self._span, self._tokens)
