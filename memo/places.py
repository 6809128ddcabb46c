"""Says where in a model a training step is, so that a recorder can note where each allocation was made.

Forward: module hooks. Backward: autograd runs no modules, so each module's output carries its name on its node, and a
hook that fires just before that node runs says that backward has come there. What runs next belongs to that module until
another node speaks up: right to within an operator or two at a module's border.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from memo.allocator.record import Recorder, Where

if TYPE_CHECKING:
    from torch.autograd.graph import Node
    from torch.utils.hooks import RemovableHandle

    from memo.swap.layers import Layer

__all__ = ["Places"]

_FORWARD = "forward"
_NAMED = "memo_module"


class Places:
    """Keeps `recorder.where` while it is entered. `phase` names the part of the step that begins."""

    def __init__(self, recorder: Recorder, model: nn.Module, layers: Sequence[Layer]) -> None:
        self._recorder = recorder
        self._model = model
        self._layers = {layer.name: layer for layer in layers}
        self._hooks: list[RemovableHandle] = []
        self._stack: list[Where] = []
        self._visits = 0

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
        self._recorder.where = Where(phase=name)

    def _watch(self, name: str, layer: str, module: nn.Module) -> list[RemovableHandle]:
        def begin(_: nn.Module, args: object) -> None:
            before = self._recorder.where
            self._stack.append(before)
            if name == layer and before.phase == _FORWARD:
                self._visits += 1
            inside = before.phase == _FORWARD  # a recompute stays in the pass that asked for it
            group = f"{layer}.{_FORWARD}" if layer else ""
            self._recorder.where = dataclasses.replace(
                before,
                module=name,
                group=group if inside else before.group,
                visit=self._visits if inside and layer else before.visit,
            )

        def end(_: nn.Module, args: object, output: Any) -> None:
            here = self._recorder.where
            if self._stack:
                self._recorder.where = self._stack.pop()
            if here.phase == _FORWARD:
                for tensor in output if isinstance(output, tuple) else (output,):
                    if isinstance(tensor, torch.Tensor) and tensor.grad_fn is not None:
                        self._name(tensor.grad_fn, name, layer, here.visit)

        return [
            module.register_forward_pre_hook(begin),
            module.register_forward_hook(end, always_call=True),
        ]

    def _name(self, node: Node, name: str, layer: str, visit: int) -> None:
        if _NAMED in node.metadata:
            return  # the output of an inner module, which says more
        node.metadata[_NAMED] = name
        reached = Where(phase="backward", module=name, group=f"{layer}.backward" if layer else "", visit=visit)

        def reach(_: object) -> None:
            self._recorder.where = reached

        node.register_prehook(reach)

    def _layer_of(self, name: str) -> str:
        """The layer that the module is or lies in; empty outside of all."""
        parts = name.split(".")
        prefixes = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
        return next((prefix for prefix in prefixes if prefix in self._layers), "")
