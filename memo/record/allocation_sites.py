"""Says where in a model a training step is, so that a recorder can note where each allocation was made.

Forward: module hooks. Backward: autograd runs no modules, so each module's output carries its name on its node, and a
hook that fires just before that node runs says that backward has come there. What runs next belongs to that module until
another node speaks up: right to within an operator or two at a module's border.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memo.allocator import AllocationSite, Recorder

if TYPE_CHECKING:
    from torch.autograd.graph import Node
    from torch.utils.hooks import RemovableHandle

    from memo.swap import Layer

__all__ = ["Places"]

_FORWARD, _BACKWARD = "forward", "backward"
_NAMED = "memo_module"


class Places:
    """Keeps `recorder.site` while it is entered. `phase` names the part of the step that begins."""

    def __init__(self, recorder: Recorder, model: nn.Module, layers: Sequence[Layer]) -> None:
        self._recorder = recorder
        self._model = model
        self._layers = {layer.name: layer for layer in layers}
        self._hooks: list[RemovableHandle] = []
        self._stack: list[AllocationSite] = []
        self._visits: collections.Counter[str] = collections.Counter()

    def __enter__(self) -> Places:
        for name, module in self._model.named_modules():
            self._hooks += self._watch(name, self._layer_of(name), module)
        return self

    def __exit__(self, *exception: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._stack.clear()

    def phase(self, name: str) -> None:
        """The step goes on to another part."""
        self._recorder.site = AllocationSite(phase=name)

    def _watch(self, name: str, layer: str, module: nn.Module) -> list[RemovableHandle]:
        def begin(_: nn.Module, args: object) -> None:
            before = self._recorder.site
            self._stack.append(before)
            group = before.group  # a layer's part, or a recompute, stays in the pass that runs it
            if layer and name == layer and before.phase == _FORWARD:
                self._visits[layer] += 1
                group = _group(layer, _FORWARD, self._visits[layer])
            self._recorder.site = dataclasses.replace(before, module=name, group=group)

        def end(_: nn.Module, args: object, output: Any) -> None:
            phase = self._recorder.site.phase
            if self._stack:
                self._recorder.site = self._stack.pop()
            if phase == _FORWARD:
                group = _group(layer, _BACKWARD, self._visits[layer]) if layer else ""
                for tensor in output if isinstance(output, tuple) else (output,):
                    if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
                        self._name(tensor.grad_fn, AllocationSite(phase=_BACKWARD, module=name, group=group))

        return [
            module.register_forward_pre_hook(begin),
            module.register_forward_hook(end, always_call=True),
        ]

    def _name(self, node: Node, reached: AllocationSite) -> None:
        notes: dict[str, Any] = node.metadata  # type: ignore[assignment]  # declared as the method it is not
        if _NAMED in notes:
            return  # the output of an inner module, which says more
        notes[_NAMED] = reached.module

        def reach(_: object) -> None:
            self._recorder.site = reached

        node.register_prehook(reach)

    def _layer_of(self, name: str) -> str:
        """The layer that the module is or lies in; empty outside of all."""
        parts = name.split(".")
        prefixes = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
        return next((prefix for prefix in prefixes if prefix in self._layers), "")


def _group(layer: str, way: str, visit: int) -> str:
    """One pass through one layer; of several microbatches each has passes of its own."""
    return f"{layer}.{way}" if visit == 1 else f"{layer}.{way}.{visit}"
