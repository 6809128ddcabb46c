"""Deferred logits: a tensor subclass that stands for `projection(hidden)` and computes it on first use of its elements.

A `DeferredLogits` has the shape, the dtype and the autograd node of `projection(hidden)`, and no elements. Functions
that models apply on the way to a loss are recorded or applied to the hidden states (memo.loss.logit_rules), and
`F.cross_entropy` of the outcome becomes `memo.linear_cross_entropy` of the hidden states. Any other function computes
the logits, whole and once:

    projection(hidden)    / 30, tanh, * 30    [:, :-1], .view(-1, v)    F.cross_entropy    -> logits never exist
                                                                        argmax, print, ... -> logits are computed

Invariant: elements are always the projection's own, computed under the autocast of its call; UsageError where weights
have changed since, or a function would write into the logits. In autograd's graph a deferred tensor is an ordinary
output of the projection, so any function may take it, custom autograd functions included.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from memo.errors import UsageError
from memo.loss.logit_rules import WITHOUT_ELEMENTS, by_rule
from memo.loss.logit_transform import Steps
from memo.loss.projection_loss import linear_cross_entropy
from memo.torch_private import DisableTorchFunctionSubclass, make_wrapper_subclass, tree_map_only


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Product:
    """A call of a projection that is deferred."""

    projection: nn.Linear
    autocast: torch.dtype | None
    """Its dtype where autocast was on, else None."""
    versions: tuple[tuple[Tensor, int], ...]
    """Hidden states and weights, with their version counters at the call."""
    chunk: int | None
    keep_gradients: bool
    computed: bool = False
    """The logits were computed after all."""

    def logits(self, hidden: Tensor, steps: Steps) -> Tensor:
        """Computes the logits of `hidden` (..., h), then the recorded functions of them.

        Raises:
            UsageError: hidden states or weights have changed since the call; nothing was computed.
        """
        self.computed = True
        with self._autocast_of_the_call(hidden):
            raw = type(self.projection).forward(self.projection, hidden)
        return steps.of(raw)

    def loss(self, hidden: Tensor, steps: Steps, targets: Tensor, **arguments: Any) -> Tensor | None:
        """Cross entropy of the logits without computing them; None where their functions have no known formula."""
        formula = steps.formula
        if formula is None:
            return None
        bias, shape = formula
        arguments |= {"bias": bias, "scale": shape.scale, "soft_cap": shape.soft_cap}
        with self._autocast_of_the_call(hidden):
            return linear_cross_entropy(
                hidden, self.projection, targets, chunk=self.chunk, keep_gradients=self.keep_gradients, **arguments
            )

    def _autocast_of_the_call(self, hidden: Tensor) -> torch.autocast:
        if any(source._version != version for source, version in self.versions):
            raise UsageError(
                "logits without elements (memo.loss_without_logits) were read after their hidden states or weights had "
                "changed; read them before the optimizer's step"
            )
        return torch.autocast(hidden.device.type, dtype=self.autocast, enabled=self.autocast is not None)


def deferred(projection: nn.Linear, hidden: Tensor, *, chunk: int | None, keep_gradients: bool) -> DeferredLogits:
    """Defers `projection(hidden)`.

    Args:
        projection: an nn.Linear with `weight` (vocabulary, h).
        hidden: (..., h); no inference tensor, since those have no version counter.
        chunk: as in `memo.linear_cross_entropy`.
        keep_gradients: as in `memo.linear_cross_entropy`.
    """
    kind = hidden.device.type
    autocast = None
    if torch.is_autocast_enabled(kind) and hidden.dtype != torch.float64:
        autocast = torch.get_autocast_dtype(kind)
    product = Product(
        projection=projection,
        autocast=autocast,
        versions=tuple((source, source._version) for source in (hidden, *projection.parameters())),
        chunk=chunk,
        keep_gradients=keep_gradients,
    )
    return _defer(product, Steps(), autocast or hidden.dtype, hidden)


class DeferredLogits(Tensor):
    """Logits (..., vocabulary) without elements until those are read."""

    product: Product
    steps: Steps
    hidden: Tensor
    """(..., h), with the logits' leading dimensions."""
    _whole: Tensor | None
    _make: Callable[[], Tensor] | None
    """Derives the elements from those of the logits that these were made of."""
    _is_copy: bool
    """Its elements are nobody else's, and may be written into."""

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return (
            f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, computed={self._whole is not None})"
        )

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in WITHOUT_ELEMENTS:
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if args and isinstance(args[0], DeferredLogits) and args[0]._whole is None:
            result = by_rule(func, args, kwargs)
            if result is not NotImplemented:
                return result
        return _with_elements(func, args, kwargs, lambda logits: logits.whole())

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Computes an operator that autograd has recorded already."""
        with torch.no_grad():
            return _with_elements(func, args, kwargs or {}, lambda logits: logits.whole().detach())

    def whole(self) -> Tensor:
        """The logits as an ordinary tensor, computed once, functions recorded so far applied."""
        if self._whole is None:
            with torch.set_grad_enabled(self.requires_grad):
                self._whole = _Read.apply(self) if self._make is None else self._make()  # type: ignore[no-untyped-call]
        return self._whole

    def recorded(self, function: Any, *arguments: Any, dtype: torch.dtype | None = None) -> DeferredLogits:
        """Logits with an element-wise function recorded, in `dtype`."""
        steps = self.steps.then(function, *arguments)
        return self._derived(steps, dtype or self.dtype, self.hidden, lambda: function(self.whole(), *arguments))

    def rows(self, hidden: Tensor, function: Callable[[Tensor], Tensor]) -> DeferredLogits:
        """Logits of other rows: `function` makes them of the logits, and has made `hidden` of the hidden states."""
        return self._derived(self.steps, self.dtype, hidden, lambda: function(self.whole()))

    def copy(self) -> DeferredLogits:
        """Logits with elements of their own, and the gradient that autograd gives the copy."""
        made = _defer(self.product, self.steps, self.dtype, self.hidden)
        made._is_copy = True
        return made

    def _derived(self, steps: Steps, dtype: torch.dtype, hidden: Tensor, make: Callable[[], Tensor]) -> DeferredLogits:
        """Deferred logits that require a gradient only where these do, whatever the weights require."""
        with self._grad_mode():
            return _defer(self.product, steps, dtype, hidden, make)

    def _grad_mode(self) -> torch.set_grad_enabled:
        return torch.set_grad_enabled(torch.is_grad_enabled() and self.requires_grad)

    def cross_entropy(self, target: Tensor, **arguments: Any) -> Any:
        """F.cross_entropy of these logits (tokens, vocabulary), or NotImplemented where it needs their elements."""
        with self._grad_mode():
            loss = self.product.loss(self.hidden, self.steps, target, **arguments)
        return NotImplemented if loss is None else loss.to(torch.promote_types(self.dtype, torch.float32))


def _with_elements(func: Any, args: Any, kwargs: Any, look: Any) -> Any:
    seen: list[tuple[Tensor, int]] = []

    def looked(logits: DeferredLogits) -> Tensor:
        whole = look(logits)
        if not logits._is_copy:
            seen.append((whole, whole._version))
        return cast("Tensor", whole)

    args, kwargs = tree_map_only(DeferredLogits, looked, (args, kwargs))
    result = func(*args, **kwargs)
    if any(whole._version != version for whole, version in seen):
        raise UsageError(
            "logits without elements (memo.loss_without_logits) cannot be written into; write into a clone of them"
        )
    return result


def _defer(
    product: Product, steps: Steps, dtype: torch.dtype, hidden: Tensor, make: Callable[[], Tensor] | None = None
) -> DeferredLogits:
    weights = tuple(product.projection.parameters())
    logits = cast("DeferredLogits", _Defer.apply(product, steps, dtype, hidden, *weights))  # type: ignore[no-untyped-call]
    logits.product, logits.steps, logits.hidden = product, steps, hidden
    logits._whole, logits._make, logits._is_copy = None, make, False
    return logits


class _Defer(torch.autograd.Function):
    """Hidden states and weights -> deferred logits. Backward, for logits that were read, computes them again."""

    @staticmethod
    def forward(
        ctx: Any, product: Product, steps: Steps, dtype: torch.dtype, hidden: Tensor, *weights: Tensor
    ) -> Tensor:
        ctx.product, ctx.steps, ctx.hidden, ctx.weights = product, steps, hidden.detach(), weights
        shape = (*hidden.shape[:-1], product.projection.weight.shape[0])
        return cast("Tensor", make_wrapper_subclass(DeferredLogits, shape, dtype=dtype, device=hidden.device))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[3:]
        with torch.enable_grad():
            sources = (ctx.hidden.detach().requires_grad_(needed[0]), *ctx.weights)
            logits = ctx.product.logits(sources[0], ctx.steps)
        wanted = [source for source, need in zip(sources, needed, strict=True) if need]
        grads = iter(torch.autograd.grad(logits, wanted, grad))
        return None, None, None, *(next(grads) if need else None for need in needed)


class _Read(torch.autograd.Function):
    """Deferred logits -> an ordinary tensor."""

    @staticmethod
    def forward(ctx: Any, logits: DeferredLogits) -> Tensor:
        return logits.product.logits(logits.hidden, logits.steps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad
