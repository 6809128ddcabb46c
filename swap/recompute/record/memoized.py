"""Saved results that a recompute reuses: of attention, of random 0/1 masks, of `memo.memoize`d functions.

Results are recorded in forward and reused in backward, in the same order. They are kept whole, like any saved tensor,
in the engine's tiers; of random 0/1 masks only the tokens to recompute are kept, one bit an element.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils._pytree import tree_flatten, tree_unflatten

from memo.kernels import pack_mask, unpack_mask
from memo.swap.recompute.axis.operator_rules import Call, Unproven
from memo.swap.recompute.axis.token_axis import Axis, cut

if TYPE_CHECKING:
    from memo.swap.engine.engine import Engine
    from memo.swap.engine.handles import Handle, Kept, Sharded

__all__ = [
    "Answer",
    "AttentionAnswer",
    "FunctionAnswer",
    "RandomAnswer",
    "is_memoized",
    "memoize",
]

_ATEN = torch.ops.aten


class Answer(Protocol):
    """A result that a recompute reuses."""

    def store(self, engine: Engine) -> None:
        """Packs its tensors, so that they move to the engine's tiers."""

    def give(self, engine: Engine, args: Sequence[Any], span: tuple[int, int], tokens: int) -> Any:
        """The result for the tokens in `span`."""


class AttentionAnswer:
    """Results of one attention operator. Only the first has a token axis; the others are used by autograd alone."""

    def __init__(self, func: torch._ops.OpOverload, out: Any, axis: Axis) -> None:
        self.func = func
        leaves, self._form = tree_flatten(out)
        self._results = _Results(leaves, [axis, *(None for _ in leaves[1:])])

    def store(self, engine: Engine) -> None:
        """Packs the results."""
        self._results.store(engine)

    def give(self, engine: Engine, args: Sequence[Any], span: tuple[int, int], tokens: int) -> Any:
        """The results, cut to the tokens of `span`."""
        return tree_unflatten(self._results.give(engine, span, tokens), self._form)


class FunctionAnswer:
    """Result of a memoized function; its tensors are kept whole."""

    def __init__(self, function: Callable[..., Any], out: Any, axes: Sequence[Axis | None]) -> None:
        self.func = function
        leaves, self._form = tree_flatten(out)
        runs = iter(axes)
        self._results = _Results(leaves, [next(runs) if isinstance(leaf, torch.Tensor) else None for leaf in leaves])
        self._grads = [isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves]

    def store(self, engine: Engine) -> None:
        """Packs the results."""
        self._results.store(engine)

    def give(self, engine: Engine, args: Sequence[Any], span: tuple[int, int], tokens: int) -> Any:
        """The results, cut to the tokens of `span`."""
        leaves = self._results.give(engine, span, tokens)
        for leaf, grad in zip(leaves, self._grads, strict=True):
            if grad:
                leaf.requires_grad_()
        return tree_unflatten(leaves, self._form)


class _Results:
    """Values of which the tensors are kept whole by the engine."""

    def __init__(self, leaves: Sequence[Any], axes: Sequence[Axis | None]) -> None:
        self._leaves = [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._axes = axes
        self._handles: list[Handle | Kept | Sharded | None] = []

    def store(self, engine: Engine) -> None:
        self._handles = [engine.pack(leaf) if isinstance(leaf, torch.Tensor) else None for leaf in self._leaves]
        self._leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in self._leaves]

    def give(self, engine: Engine, span: tuple[int, int], tokens: int) -> list[Any]:
        given: list[Any] = []
        for leaf, handle, axis in zip(self._leaves, self._handles, self._axes, strict=True):
            if handle is None:
                given.append(leaf)
                continue
            # Never the kept alias itself: autograd makes what it gets its own.
            whole = engine.unpack(handle, by_backward=False).detach()
            given.append(whole if axis is None else cut(whole, axis, *span, tokens))
        return given


class RandomAnswer:
    """A dropout's mask for the tokens to recompute, which are those from `first` on."""

    def __init__(self, func: torch._ops.OpOverload, kept: torch.Tensor, axis: Axis, first: int) -> None:
        self.func = func
        self._axis = axis
        self._first = first
        self._shape = kept.shape  # with the tokens in a dimension of their own
        self._bits: torch.Tensor | None = pack_mask(kept)
        self.bits_per_token = kept.numel() / kept.size(axis.dim + 1)
        self._handle: Handle | Kept | Sharded | None = None

    @classmethod
    def of(cls, call: Call, *, first: int) -> RandomAnswer:
        """Packs the mask that a call drew.

        Raises:
            Unproven: its random numbers are no 0/1 mask over the tokens.
        """
        target = call.args[0] if call.args else None
        axis = call.meaning(target) if isinstance(target, torch.Tensor) else None
        if call.func not in (_ATEN.bernoulli_.float, _ATEN.native_dropout.default) or not isinstance(axis, Axis):
            raise Unproven(f"{call.func.overloadpacket} draws random numbers that cannot be repeated")
        mask = call.out[1] if call.func is _ATEN.native_dropout.default else call.out
        parts = mask.unflatten(axis.dim, (axis.outer, call.tokens.tokens, axis.inner))
        tail = parts.narrow(axis.dim + 1, first, call.tokens.tokens - first)
        return cls(call.func, tail, axis, first)

    def store(self, engine: Engine) -> None:
        """Packs the bits."""
        assert self._bits is not None
        self._handle = engine.pack(self._bits)
        self._bits = None

    def give(self, engine: Engine, args: Sequence[Any], span: tuple[int, int], tokens: int) -> Any:
        """The operator's results for the tokens of `span`, from the bits of its mask."""
        assert self._handle is not None
        target: torch.Tensor = args[0]
        mask = self._mask(engine, span).reshape(target.shape)
        if self.func is _ATEN.bernoulli_.float:
            return target.copy_(mask)
        kept = torch.empty_like(target, dtype=torch.bool).copy_(mask)
        # As torch's kernel has it: in the accumulation type, value times mask times scale.
        wide = torch.promote_types(target.dtype, torch.float32)
        scale = 0.0 if args[1] >= 1.0 else 1.0 / (1.0 - args[1])
        return (target.to(wide) * kept * scale).to(target.dtype), kept

    def _mask(self, engine: Engine, span: tuple[int, int]) -> torch.Tensor:
        assert self._handle is not None
        bits = engine.unpack(self._handle, by_backward=False)
        whole = unpack_mask(bits, torch.empty(self._shape, dtype=torch.bool, device=bits.device))
        return whole.narrow(self._axis.dim + 1, span[0] - self._first, span[1] - span[0])


_Function = TypeVar("_Function", bound=Callable[..., Any])
_MEMOIZED: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()


def is_memoized(function: object) -> bool:
    """True for a function returned by `memoize`; a token-wise recompute never runs it."""
    return isinstance(function, types.FunctionType) and function in _MEMOIZED


def memoize(function: _Function | None = None, *, token_dim: int | None = None) -> Any:
    """Decorator: a token-wise layer saves the function's results whole, and its recompute reuses them.

    For operations that mix tokens (custom attention, routing of experts, scans), and for functions whose kernels the
    dispatcher does not see. Outside `memo.offload` the function runs unchanged.

        @memo.memoize(token_dim=1)
        def attend(q, k, v): ...

    Args:
        function: takes tensors anywhere in its arguments, of any shape and dtype. It must not write into them, and its
            results must be new tensors, no views of its arguments; otherwise the layer moves whole, with a warning.
        token_dim: dimension of the results that runs over the tokens. By default the one whose size is the number of
            tokens, and of several the last but one.

    Returns:
        The function with the same signature; without `function`, a decorator.
    """
    if function is None:
        return functools.partial(memoize, token_dim=token_dim)

    @functools.wraps(function)
    def memoized(*args: Any, **kwargs: Any) -> Any:
        for mode in reversed(_get_current_dispatch_mode_stack()):
            answer = getattr(mode, "memoized", None)
            if answer is not None:
                return answer(function, args, kwargs, token_dim)
        return function(*args, **kwargs)

    _MEMOIZED.add(memoized)
    return memoized
