"""Saved results that a recompute reuses: of attention, of random 0/1 masks, of `memo.memoize`d functions.

A result is recorded in forward and reused in backward, in the same order. Results are kept whole, as any saved tensor, in the
engine's tiers; of random 0/1 masks only the tokens that will be recomputed are kept, one bit an element.
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
    from memo.swap.engine.saved_storage import Handle, Kept, Sharded

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
    """One result that is not computed twice."""

    def store(self, engine: Engine) -> None:
        """Hands what it holds to the engine's tiers."""

    def give(self, engine: Engine, args: Sequence[Any], span: tuple[int, int], tokens: int) -> Any:
        """The result for the tokens in `span`."""


class AttentionAnswer:
    """All results of one attention operator. Only the first runs over the tokens; autograd alone uses the others."""

    def __init__(self, func: torch._ops.OpOverload, out: Any, axis: Axis) -> None:
        self.func = func
        leaves, self._form = tree_flatten(out)
        self._results = _Results(leaves, [axis, *(None for _ in leaves[1:])])

    def store(self, engine: Engine) -> None:
        self._results.store(engine)

    def give(self, engine: Engine, args: Sequence[Any], span: tuple[int, int], tokens: int) -> Any:
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
        self._results.store(engine)

    def give(self, engine: Engine, args: Sequence[Any], span: tuple[int, int], tokens: int) -> Any:
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
    """A dropout's mask, for the tokens from `first` on, which are those that will be recomputed."""

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
        """Raises Unproven for random numbers that are no mask over the tokens."""
        target = call.args[0] if call.args else None
        axis = call.meaning(target) if isinstance(target, torch.Tensor) else None
        if call.func not in (_ATEN.bernoulli_.float, _ATEN.native_dropout.default) or not isinstance(axis, Axis):
            raise Unproven(f"{call.func.overloadpacket} draws random numbers that cannot be repeated")
        mask = call.out[1] if call.func is _ATEN.native_dropout.default else call.out
        parts = mask.unflatten(axis.dim, (axis.outer, call.tokens.tokens, axis.inner))
        tail = parts.narrow(axis.dim + 1, first, call.tokens.tokens - first)
        return cls(call.func, tail, axis, first)

    def store(self, engine: Engine) -> None:
        assert self._bits is not None
        self._handle = engine.pack(self._bits)
        self._bits = None

    def give(self, engine: Engine, args: Sequence[Any], span: tuple[int, int], tokens: int) -> Any:
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
    """True for what `memoize` returned: no recompute of a part of the tokens runs it, whatever it keeps for itself."""
    return isinstance(function, types.FunctionType) and function in _MEMOIZED


def memoize(function: _Function | None = None, *, token_dim: int | None = None) -> Any:
    """Marks a function that a token-wise layer must not compute twice: its results are saved whole.

    For attention of one's own, the routing of experts, scans: whatever mixes tokens. The function may depend on any token;
    its results must be new tensors. Outside memo.offload it runs as it is.

    Args:
        function: called with tensors anywhere in its arguments.
        token_dim: the dimension of its results that runs over the tokens; by default the one that is as long.
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
