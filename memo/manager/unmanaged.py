"""Says once where backward runs and no forward of the model was managed: `memo.offload` was called and nothing else.

Owns one hook on one parameter, until the first managed forward or the first backward. The hook keeps neither the model nor
the manager, is in no copy and no file of the model, and does not run in an evaluation.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from memo.warn_user import warn_user

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch
    from torch import nn
    from torch.utils.hooks import RemovableHandle

    from memo.swap import Layer

_watched: weakref.WeakKeyDictionary[nn.Module, ForgottenAttach] = weakref.WeakKeyDictionary()
"""Model -> its watch, which ends where another manager of the model begins one."""


class ForgottenAttach:
    """Waits for a backward of a model of which no forward was managed.

    Args:
        model: held weakly.
        layers: its managed layers, of which a trained parameter is watched.
    """

    def __init__(self, model: nn.Module, layers: Sequence[Layer]) -> None:
        other = _watched.get(model)
        if other is not None:
            other.stop()
        self.is_attached = False
        self._name = type(model).__name__
        self._handle: RemovableHandle | None = None
        parameter = _trained(model, layers)
        if parameter is not None:
            self._handle = parameter.register_hook(_Hook(self))
            _watched[model] = self

    def stop(self) -> None:
        """Ends the watch. Idempotent."""
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def backward_ran(self) -> None:
        """Warns, and ends the watch."""
        if self._handle is None:
            return
        self.stop()
        why = "call manager.attach() once, or run each forward inside `with manager:`"
        if self.is_attached:
            why = (
                "it is attached, but neither the model nor a part around its layers was called, model(...), with gradients; "
                "a model that is compiled as a whole runs no hooks: compile its layers one by one; nor does memo "
                "manage forwards that torch traces, that torch.func's grad, vjp or jacrev differentiate, or that run within "
                "allow_mutation_on_saved_tensors"
            )
        warn_user(f"memo.offload: backward ran, and no forward of {self._name} was managed: {why}")


class _Hook:
    """Hook of a parameter."""

    __torch_unserializable__ = True  # torch then leaves it out of files without a warning

    def __init__(self, watch: ForgottenAttach) -> None:
        self._watch = watch

    def __call__(self, gradient: torch.Tensor) -> None:
        self._watch.backward_ran()


def _trained(model: nn.Module, layers: Sequence[Layer]) -> torch.Tensor | None:
    """A parameter of the layers that is trained, or else of the model."""
    for module in (*(layer.module for layer in layers), model):
        for parameter in module.parameters():
            if parameter.requires_grad:
                return parameter
    return None
