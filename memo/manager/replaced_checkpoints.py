"""torch.utils.checkpoint around managed layers: a plain call within their manager, which decides itself what is recomputed.

    model.gradient_checkpointing_enable()      transformers' layers call torch's checkpoint with themselves as its function
    checkpoint_wrapper(layer)                  the layer's forward is a checkpoint of the module within

A checkpoint of a part of a layer stays: the program has chosen it. One with contexts of its own (`context_fn`) stays,
since they may change what the layer computes; those of torch's selective checkpointing are known not to. A reentrant one
stays: a plain call would sum gradients in another order, and give tensors that leave the layer by a list, an attribute or
a hook gradients that it does not give them. torch has no hook for this, so the two functions that its `checkpoint` calls
are replaced once, when this module is imported.
"""

from __future__ import annotations

import functools
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointFunction, create_selective_checkpoint_contexts, noop_context_fn

from memo.manager import claims
from memo.nested import closure_of
from memo.swap import runs_as_written
from memo.torch_private import current_graph_task_id, found, place

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator

    from memo.manager.manager import Manager

_CALLS = frozenset({"forward", "_call_impl", "_wrapped_call_impl"})
"""Names of the methods that run the whole of a module."""

_KNOWN = (nullcontext, *map(type, create_selective_checkpoint_contexts([])))
"""Contexts that change no values: none, and those of torch's selective checkpointing, by whatever function they are made."""

_BEFORE_2_14 = "checkpoint_without_reentrant_generator"
_FROM_2_14 = "checkpoint_without_reentrant_generator_impl"
_NAME = _BEFORE_2_14 if found(_FROM_2_14) is None else _FROM_2_14
_checkpointed: Callable[..., Iterator[None]] = found(_NAME)


def _before_2_14(
    function: Callable[..., Any], preserve_rng_state: bool, context_fn: Any, *args: Any, **kwargs: Any
) -> Iterator[None]:
    """Torch's generator, which goes on after the forward, or one that does nothing."""
    stays = _contexts_that_stay(function, args, context_fn)
    return _nothing() if stays is None else _checkpointed(function, preserve_rng_state, stays, *args, **kwargs)


def _from_2_14(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Any, *, context_fn: Any = noop_context_fn, **how: Any
) -> Iterator[None]:
    """Torch's generator or one that does nothing, with the arguments that torch gives it from 2.14 on."""
    stays = _contexts_that_stay(function, args, context_fn)
    return _nothing() if stays is None else _checkpointed(function, args, kwargs, context_fn=stays, **how)


def _contexts_that_stay(function: Callable[..., Any], args: tuple[Any, ...], context_fn: Any) -> Any:
    """Context function for a checkpoint that stays; None where a plain call replaces it."""
    if not (claims.entered() and runs_as_written()):
        return context_fn
    contexts = tuple(context_fn())  # once for each checkpoint, as torch does
    if not all(isinstance(each, _KNOWN) for each in contexts):
        for manager in claims.entered():
            manager.notes_checkpoint(())
    elif is_replaced(function, args):
        return None
    return context_fn if context_fn is noop_context_fn else functools.partial(_given, contexts)


def _given(contexts: Any) -> Any:
    return contexts


def _nothing() -> Iterator[None]:
    yield


def _apply(kind: type[CheckpointFunction], *args: Any) -> Any:
    """Torch's reentrant checkpoint, of which managers are told."""
    for manager in claims.entered():
        manager.notes_checkpoint(())
    return super(CheckpointFunction, kind).apply(*args)  # type: ignore[no-untyped-call]


def is_replaced(function: Callable[..., Any], args: tuple[Any, ...]) -> bool:
    """Tells whether a checkpoint of `function`, called with `args`, is a plain call in the managers of this thread."""
    if not torch.is_grad_enabled() or current_graph_task_id() >= 0 or not runs_as_written():
        return False
    return any(manager.replaces_checkpoint_of(_called(function, args, manager)) for manager in claims.entered())


def _called(function: Callable[..., Any], args: tuple[Any, ...], manager: Manager) -> list[nn.Module]:
    """The modules that a checkpoint calls; none for a `layer.forward`, which would bypass the hooks on the layer."""
    is_within = manager.open_layer is not None
    module = getattr(function, "__self__", None)
    if not is_within and isinstance(module, nn.Module) and function == module.forward:
        return []
    return list(modules_of((function, *args), whole=is_within))


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
        within = [own] if not whole or getattr(called, "__name__", "") in _CALLS else []
        if not whole:
            within += closure_of(called)
    for each in within:
        yield from modules_of(each, whole=whole, depth=depth - 1)


setattr(*place(_NAME), _before_2_14 if _NAME == _BEFORE_2_14 else _from_2_14)
CheckpointFunction.apply = classmethod(_apply)  # type: ignore[method-assign,assignment]
