"""torch.utils.checkpoint around managed layers: a plain call within their manager, which decides itself what is recomputed.

    model.gradient_checkpointing_enable()      transformers' layers call torch's checkpoint with themselves as its function
    checkpoint_wrapper(layer)                  the layer's forward is a checkpoint of the module within

A checkpoint of a part of a layer stays: the program has chosen it. One with contexts of its own (`context_fn`) stays,
since they may change what the layer computes; those of torch's selective checkpointing are known not to.

A reentrant one runs a backward of its own, so its gradients are added up in another order than a plain call's. The call is
put between two autograd functions (`_Enter`, `_Join`), where the order is the same. It stays where parameters would still
differ in their last bits: they are shared with another module, or an earlier call's backward is yet to come.

torch has no hook for that, so the two functions that its `checkpoint` calls are replaced once, when this module is imported.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointFunction, create_selective_checkpoint_contexts

from memo.manager import claims
from memo.swap import runs_as_written
from memo.torch_private import current_graph_task_id, found, place, tree_leaves, tree_map_only

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

_CALLS = frozenset({"forward", "_call_impl", "_wrapped_call_impl"})
"""Names of the methods that run the whole of a module."""

_KNOWN = (nullcontext, type(create_selective_checkpoint_contexts([])[0]))
"""Contexts that change no values: none, and those of torch's selective checkpointing, by whatever function they are made."""

_checkpointed = found("checkpoint_without_reentrant_generator")
_reentrant = torch.autograd.Function.__dict__["apply"].__func__  # of any class of functions


def _generator(
    function: Callable[..., Any], preserve_rng_state: bool, context_fn: Any, *args: Any, **kwargs: Any
) -> Iterator[None]:
    """Torch's generator, which goes on after the forward, or one that does nothing."""
    if claims.entered() and runs_as_written():
        contexts = context_fn()  # once for each checkpoint, as torch does
        context_fn = functools.partial(_given, contexts)
        if not isinstance(contexts[0], _KNOWN):
            for manager in claims.entered():
                manager.notes_checkpoint(())
        elif is_replaced(function, args):
            return _nothing()
    made: Iterator[None] = _checkpointed(function, preserve_rng_state, context_fn, *args, **kwargs)
    return made


def _given(contexts: Any) -> Any:
    return contexts


def _nothing() -> Iterator[None]:
    yield


class ReentrantCall:
    """A reentrant checkpoint that is replaced, until its backward."""


class _Enter(torch.autograd.Function):
    """Inputs of a region: their gradients are summed over its uses first, and leave it together."""

    @staticmethod
    def forward(ctx: Any, region: ReentrantCall, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.region = region
        ctx.set_materialize_grads(False)
        return tuple(each.detach() for each in inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ctx.region = None
        return None, *gradients


class _Join(torch.autograd.Function):
    """Outputs of a region: its backward begins once the gradients of all are there, zeros for those not used."""

    @staticmethod
    def forward(ctx: Any, *outputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(each.detach() for each in outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return gradients


def _apply(kind: type, *args: Any) -> Any:
    """Torch's reentrant checkpoint, or a plain call with the same gradients."""
    region = ReentrantCall()
    if kind is CheckpointFunction and _has_gradients_by_args(args[0], args[2:]):
        if is_replaced(args[0], args[2:], region):
            return _called(region, args[0], args[2:])
    else:
        for manager in claims.entered():
            manager.notes_checkpoint(())
    return _reentrant(kind, *args)


def _has_gradients_by_args(function: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Tells whether a reentrant checkpoint gives gradients, and none to tensors within others or within a partial."""
    within = [each for each in args if not isinstance(each, torch.Tensor)]
    if isinstance(function, functools.partial):
        within += [function.args, function.keywords]
    return any(map(_has_gradient, args)) and not any(map(_has_gradient, tree_leaves(within)))


def _called(region: ReentrantCall, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    """The function's result, with the gradients of a reentrant checkpoint."""
    result = function(*_with_gradients(args, functools.partial(_Enter.apply, region)))
    outputs = tuple(
        each if isinstance(each, torch.Tensor) else tree_map_only(torch.Tensor, torch.Tensor.detach, each)
        for each in (result if isinstance(result, tuple) else (result,))
    )
    if sum(_has_gradient(each) for each in outputs) > 1:
        outputs = _with_gradients(outputs, _Join.apply)
    return outputs if isinstance(result, tuple) else outputs[0]


def _with_gradients(values: tuple[Any, ...], function: Callable[..., tuple[torch.Tensor, ...]]) -> tuple[Any, ...]:
    """The values, those of them that have gradients replaced by the function's results."""
    results = iter(function(*filter(_has_gradient, values)))
    return tuple(next(results) if _has_gradient(each) else each for each in values)


def _has_gradient(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad


def is_replaced(function: Callable[..., Any], args: tuple[Any, ...], region: ReentrantCall | None = None) -> bool:
    """Tells whether a checkpoint of `function`, called with `args`, is a plain call in the managers of this thread.

    Args:
        function: what the checkpoint runs.
        args: its arguments.
        region: the checkpoint, if it is a reentrant one.
    """
    if not torch.is_grad_enabled() or current_graph_task_id() >= 0 or not runs_as_written():
        return False
    return any(
        manager.replaces_checkpoint_of(
            list(modules_of((function, *args), whole=manager.open_layer is not None or region is not None)), region
        )
        for manager in claims.entered()
    )


def modules_of(called: Any, *, whole: bool = False, depth: int = 4) -> Iterator[nn.Module]:
    """Modules that a function calls, as far as it shows: itself, that of a method or a partial, or one in its closure.

    Args:
        called: the function, or several with their arguments.
        whole: leaves out modules of which a part may run: by another method than forward, or in a closure.
        depth: of what is looked into.
    """
    if isinstance(called, nn.Module):
        yield called
    if not depth or isinstance(called, (nn.Module, torch.Tensor)):
        return
    within: Iterable[Any] = called if isinstance(called, (list, tuple)) else ()
    if isinstance(called, functools.partial):
        within = (called.func, *called.args)
    elif callable(called):
        own = getattr(called, "__self__", None)
        cells = getattr(called, "__closure__", None) or ()
        within = [own] if not whole or getattr(called, "__name__", "") in _CALLS else []
        if not whole:
            within += [cell.cell_contents for cell in cells if _is_filled(cell)]
    for each in within:
        yield from modules_of(each, whole=whole, depth=depth - 1)


def _is_filled(cell: Any) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


setattr(*place("checkpoint_without_reentrant_generator"), _generator)
CheckpointFunction.apply = classmethod(_apply)  # type: ignore[method-assign,assignment]
