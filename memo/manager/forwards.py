"""Where a model's training forwards begin and end, seen by hooks on the model itself.

Owns the hooks, and which of nested calls is the outermost one. It manages nothing: it calls `begin` and `end`.

A training forward runs as written, with gradients enabled and outside a backward: evaluation, `generate`, what a checkpoint
runs again, and what torch traces or differentiates by torch.func (`runs_as_written`) are none. The
entries of a model are the modules through whose forward its layers are reached: the model, and what stands between it and
its layers, which a program may call itself (`model.model(ids)` for a loss without logits, `self.model(batch)` in Lightning's
`training_step`).
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memo.swap import hook_forward, runs_as_written
from memo.torch_private import current_graph_task_id

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from memo.swap import Layer, LayerHook

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
        """The outermost call is a training forward, whose `begin` has been called and whose `end` has not returned."""


class ForwardHooks:
    """Hooks on a model's entries, until `remove`.

    Args:
        entries: of the model, by `entries_of`.
        begin: called with (args, kwargs) before an outermost training forward; what it raises, the forward raises.
        end: called after it with True if the forward has raised, and again if it is interrupted itself. After a
            KeyboardInterrupt, which runs no hooks, it is called when the forward's frame is freed, which a traceback that is
            kept delays, and at the latest before the next forward.
    """

    def __init__(self, entries: Sequence[nn.Module], begin: _Begin, end: _End) -> None:
        self._begin = begin
        self._end = end
        self._calls = _Calls()
        self._hooks: list[LayerHook] = [
            hook_forward(module, self._enter, self._leave, outermost=True) for module in entries
        ]

    def install(self) -> None:
        """Puts the hooks in place; `remove` must follow."""
        for hook in self._hooks:
            hook.install()

    @property
    def is_within(self) -> bool:
        """True in the thread of a training forward under way."""
        self._forget_interrupted()
        return self._calls.is_training

    def remove(self) -> None:
        """Removes the hooks. Idempotent, also where it is interrupted."""
        while self._hooks:
            self._hooks[-1].remove()
            self._hooks.pop()

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if not runs_as_written():
            return
        calls = self._calls
        if module in calls.modules:
            self._forget_interrupted(now=1)
        calls.modules.append(module)
        if len(calls.modules) == 1 and _is_training():
            _call_at_end(self._forget_interrupted)
            calls.is_training = True
            try:
                self._begin(args, kwargs)
            except BaseException:
                calls.is_training = False
                raise

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
            self._end(failed)
            self._calls.is_training = False

    def _forget_interrupted(self, now: int = 0) -> None:
        """Drops calls that were interrupted where no hook is called (Ctrl-C): their frames are gone from the stack."""
        calls = self._calls
        if calls.modules or calls.is_training:
            running = list(_called_modules())[now:]
            kept = [module for module in calls.modules if any(module is other for other in running)]
            calls.modules[:] = kept
            if not kept:
                self._end_outermost(failed=True)


def _is_training() -> bool:
    return torch.is_grad_enabled() and current_graph_task_id() < 0


class _CallEnd:
    """Calls `gone` when the frame that holds it is freed, however its call has ended."""

    _thread = 0  # none, until all is there

    def __init__(self, gone: Callable[[], None]) -> None:
        self._gone = gone
        self._thread = threading.get_ident()

    def __del__(self) -> None:
        if self._thread == threading.get_ident():
            try:
                self._gone()
            except BaseException:  # interrupted; Python drops what is raised here, so the work is done first
                self._gone()
                raise


def _call_at_end(gone: Callable[[], None]) -> None:
    """Has `gone` called when the frame of the module's call whose pre-hooks run now is freed.

    Its local `called_always_called_hooks`, a set, holds what does so. Where torch has none of that name, nothing is done.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_name != "inner":
        frame = frame.f_back
    called = None if frame is None else frame.f_locals.get("called_always_called_hooks")
    if isinstance(called, set):
        called.add(_CallEnd(gone))


def _called_modules() -> Iterator[nn.Module]:
    """Modules whose calls are on this thread's stack, innermost first."""
    frame = sys._getframe(1)  # not its own: with an exception's traceback that would be a cycle
    while frame is not None:
        if frame.f_code is nn.Module._wrapped_call_impl.__code__:
            yield frame.f_locals["self"]
        frame = frame.f_back  # type: ignore[assignment]
