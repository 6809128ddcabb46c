"""Logits that are known by what they are made of, and made when somebody looks at them.

A `DeferredLogits` has the shape, the dtype and the place in autograd's graph of `projection(hidden)`, and no elements. What
models do to logits on their way to a loss is noted or done to the hidden states (memo.loss.logit_rules), and
`F.cross_entropy` of the outcome is `memo.linear_cross_entropy` of what it is made of. Everything else makes them,
whole and once:

    projection(hidden)    / 30, tanh, * 30    [:, :-1], .view(-1, v)    F.cross_entropy    -> no logits are made
                                                                        argmax, print, ... -> they are, then as ever

The invariant: nobody sees other numbers than the projection's. They are made in the autocast of its call; where weights have
changed since, or something would write into the logits, an error says so. In autograd's graph a deferred tensor is the
projection's output like any other, so it may be given to any function, custom ones with a backward of their own included.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils._pytree import tree_map_only

from memo.errors import UsageError
from memo.loss.logit_rules import WITHOUT_ELEMENTS, by_rule
from memo.loss.logit_transform import Steps
from memo.loss.projection_loss import linear_cross_entropy

__all__ = ["DeferredLogits", "Product", "deferred"]


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Product:
    """A call of a projection that was not carried out."""

    projection: nn.Linear
    autocast: torch.dtype | None
    """Of matrix products, where autocast was on."""
    versions: tuple[tuple[Tensor, int], ...]
    """Hidden states and weights, and how often each had been written to."""
    chunk: int | None
    keep_gradients: bool
    made: bool = False
    """Somebody looked at the logits."""

    def logits(self, hidden: Tensor, steps: Steps) -> Tensor:
        """As the model would have made them."""
        self.made = True
        with self._at_the_call(hidden):
            raw = type(self.projection).forward(self.projection, hidden)
        return steps.of(raw)

    def loss(self, hidden: Tensor, steps: Steps, targets: Tensor, **arguments: Any) -> Tensor | None:
        """Their cross-entropy, or None where it needs them."""
        formula = steps.formula
        if formula is None:
            return None
        bias, shape = formula
        arguments |= {"bias": bias, "scale": shape.scale, "soft_cap": shape.soft_cap}
        with self._at_the_call(hidden):
            return linear_cross_entropy(
                hidden, self.projection, targets, chunk=self.chunk, keep_gradients=self.keep_gradients, **arguments
            )

    def _at_the_call(self, hidden: Tensor) -> torch.autocast:
        if any(source._version != version for source, version in self.versions):
            raise UsageError(
                "these logits were not kept, and what they are made of has changed since; look at them before the "
                "optimizer's step"
            )
        return torch.autocast(hidden.device.type, dtype=self.autocast, enabled=self.autocast is not None)


def deferred(projection: nn.Linear, hidden: Tensor, *, chunk: int | None, keep_gradients: bool) -> DeferredLogits:
    """`projection(hidden)`, called here and now. It must not be an inference tensor: these do not count their changes."""
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
    """See the module."""

    product: Product
    steps: Steps
    hidden: Tensor
    """With the logits' leading dimensions."""
    _whole: Tensor | None
    _make: Callable[[], Tensor] | None
    """From those that these were derived from."""

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype}, made={self._whole is not None})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in WITHOUT_ELEMENTS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if args and isinstance(args[0], DeferredLogits) and args[0]._whole is None:
            result = by_rule(func, args, kwargs)
            if result is not NotImplemented:
                return result
        return _with_elements(func, args, kwargs, lambda logits: logits.whole())

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """Autograd has noted the operation; what is left is to compute it."""
        with torch.no_grad():
            return _with_elements(func, args, kwargs or {}, lambda logits: logits.whole().detach())

    def whole(self) -> Tensor:
        """All logits: made once, and what was done to them done to these."""
        if self._whole is None:
            with torch.set_grad_enabled(self.requires_grad):
                self._whole = _Look.apply(self) if self._make is None else self._make()  # type: ignore[no-untyped-call]
        return self._whole

    def noted(self, function: Any, *arguments: Any, dtype: torch.dtype | None = None) -> DeferredLogits:
        """What `function` makes of each element."""
        steps = self.steps.then(function, *arguments)
        return self._derived(steps, dtype or self.dtype, self.hidden, lambda: function(self.whole(), *arguments))

    def rows(self, hidden: Tensor, function: Callable[[Tensor], Tensor]) -> DeferredLogits:
        """What `function` makes of the rows; it makes `hidden` of the hidden states."""
        return self._derived(self.steps, self.dtype, hidden, lambda: function(self.whole()))

    def _derived(self, steps: Steps, dtype: torch.dtype, hidden: Tensor, make: Callable[[], Tensor]) -> DeferredLogits:
        """Has a gradient only where these have one, though the weights that it is made of do."""
        with self._grad_mode():
            return _defer(self.product, steps, dtype, hidden, make)

    def _grad_mode(self) -> torch.set_grad_enabled:
        return torch.set_grad_enabled(torch.is_grad_enabled() and self.requires_grad)

    def cross_entropy(self, target: Tensor, **arguments: Any) -> Any:
        with self._grad_mode():
            loss = self.product.loss(self.hidden, self.steps, target, **arguments)
        return NotImplemented if loss is None else loss.to(torch.promote_types(self.dtype, torch.float32))


def _with_elements(func: Any, args: Any, kwargs: Any, look: Any) -> Any:
    seen: list[tuple[Tensor, int]] = []

    def looked(logits: DeferredLogits) -> Tensor:
        whole = look(logits)
        seen.append((whole, whole._version))
        return cast("Tensor", whole)

    args, kwargs = tree_map_only(DeferredLogits, looked, (args, kwargs))
    result = func(*args, **kwargs)
    if any(whole._version != version for whole, version in seen):
        raise UsageError("logits that were not made cannot be written into; clone them, and write into the clone")
    return result


def _defer(
    product: Product, steps: Steps, dtype: torch.dtype, hidden: Tensor, make: Callable[[], Tensor] | None = None
) -> DeferredLogits:
    weights = tuple(product.projection.parameters())
    logits = cast("DeferredLogits", _Defer.apply(product, steps, dtype, hidden, *weights))  # type: ignore[no-untyped-call]
    logits.product, logits.steps, logits.hidden = product, steps, hidden
    logits._whole, logits._make = None, make
    return logits


class _Defer(torch.autograd.Function):
    """Hidden states and weights -> deferred logits. Backward, if something looked at them, makes them again."""

    @staticmethod
    def forward(
        ctx: Any, product: Product, steps: Steps, dtype: torch.dtype, hidden: Tensor, *weights: Tensor
    ) -> Tensor:
        ctx.product, ctx.steps, ctx.hidden, ctx.weights = product, steps, hidden.detach(), weights
        shape = (*hidden.shape[:-1], product.projection.weight.shape[0])
        return cast("Tensor", Tensor._make_wrapper_subclass(DeferredLogits, shape, dtype=dtype, device=hidden.device))

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


class _Look(torch.autograd.Function):
    """Deferred logits -> an ordinary tensor."""

    @staticmethod
    def forward(ctx: Any, logits: DeferredLogits) -> Tensor:
        return logits.product.logits(logits.hidden, logits.steps)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad
