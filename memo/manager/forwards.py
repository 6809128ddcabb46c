"""Where a model's training forwards begin and end, seen by hooks on the model itself.

Owns the hooks, and which of nested calls is the outermost one. It manages nothing: it calls `begin` and `end`.

A training forward runs as written, with gradients enabled and outside a backward: evaluation, `generate`, what a checkpoint
runs again, and what torch traces or transforms (`runs_as_written`) are none. The
entries of a model are the modules through whose forward its layers are reached: the model, and what stands between it and
its layers, which a program may call itself (`model.model(ids)` for a loss without logits, `self.model(batch)` in Lightning's
`training_step`).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memo.swap import hook_forward, runs_as_written

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from memo.swap import Layer, LayerHook

__all__ = ["ForwardHooks", "entries_of"]

_Begin = Callable[[tuple[Any, ...], dict[str, Any]], None]
_End = Callable[[bool], None]


def entries_of(model: nn.Module, layers: Sequence[Layer]) -> list[nn.Module]:
    """Returns the modules through whose forward the layers are reached, the model first; none within a compiled one."""
    managed = {layer.module for layer in layers}
    above = {module for module in model.modules() if any(child in managed for child in module.modules())}
    return list(dict.fromkeys(_entries(model, managed, above)))


def _entries(module: nn.Module, managed: set[nn.Module], above: set[nn.Module]) -> Iterator[nn.Module]:
    if not isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        yield module
    if _is_compiled(module):
        return  # hooks inside would be compiled with it
    for child in module.children():
        if child in above and child not in managed:
            yield from _entries(child, managed, above)


def _is_compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None or "_orig_mod" in module._modules


class _Calls(threading.local):
    """Calls of entries that are under way in this thread, outermost first."""

    def __init__(self) -> None:
        self.modules: list[nn.Module] = []
        self.is_training = False
        """The outermost call is a training forward, whose `begin` has returned."""


class ForwardHooks:
    """Hooks on a model's entries, until `remove`.

    Args:
        entries: of the model, by `entries_of`.
        begin: called with (args, kwargs) before an outermost training forward; what it raises, the forward raises.
        end: called after it with True where the forward has raised. After a KeyboardInterrupt, which runs no hooks, it is
            called before the next forward.
    """

    def __init__(self, entries: Sequence[nn.Module], begin: _Begin, end: _End) -> None:
        self._begin = begin
        self._end = end
        self._calls = _Calls()
        self._hooks: list[LayerHook] = []
        for module in entries:
            self._hooks += _hooked(module, _Hook(self._enter), _Hook(self._leave))

    @property
    def is_within(self) -> bool:
        """True in the thread of a training forward under way."""
        self._forget_interrupted()
        return self._calls.is_training

    def remove(self) -> None:
        """Removes the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not runs_as_written():
            return
        calls = self._calls
        if module in calls.modules:
            self._forget_interrupted(now=1)
        calls.modules.append(module)
        if len(calls.modules) == 1 and _is_training():
            self._begin(args, kwargs)
            calls.is_training = True

    def _leave(self, module: nn.Module, args: object, output: object) -> None:
        calls = self._calls
        if not runs_as_written() or module not in calls.modules:
            return
        while calls.modules.pop() is not module:
            pass
        if not calls.modules:
            self._end_outermost(failed=output is None)

    def _end_outermost(self, *, failed: bool) -> None:
        if self._calls.is_training:
            self._calls.is_training = False
            self._end(failed)

    def _forget_interrupted(self, now: int = 0) -> None:
        """Drops calls that were interrupted where no hook is called (Ctrl-C): their frames are gone from the stack."""
        calls = self._calls
        if calls.modules:
            running = list(_called_modules())[now:]
            kept = [module for module in calls.modules if any(module is other for other in running)]
            if len(kept) < len(calls.modules):
                calls.modules[:] = kept
                if not kept:
                    self._end_outermost(failed=True)


def _is_training() -> bool:
    return torch.is_grad_enabled() and torch._C._current_graph_task_id() < 0


def _hooked(module: nn.Module, begin: _Hook, end: _Hook) -> list[LayerHook]:
    """Hooks a module, with `begin` before all others that it has now: what they raise, `end` hears of."""
    if module._compiled_call_impl is not None:
        return hook_forward(module, begin, end)
    return [
        module.register_forward_pre_hook(begin, prepend=True, with_kwargs=True),
        module.register_forward_hook(end, always_call=True, prepend=True),
    ]


def _called_modules() -> Iterator[nn.Module]:
    """Modules whose calls are on this thread's stack, innermost first."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code is nn.Module._wrapped_call_impl.__code__:
            yield frame.f_locals["self"]
        frame = frame.f_back  # type: ignore[assignment]


class _Hook:
    """A hook that a copy of the module does not have: it would call the original's."""

    def __init__(self, call: Callable[..., None]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> None:
        self._call(*args)

    def __reduce__(self) -> tuple[Callable[[], Callable[..., None]], tuple[()]]:
        return _inert, ()


def _inert() -> Callable[..., None]:
    return _nothing


def _nothing(*args: object) -> None:
    """The hook of a copy."""
