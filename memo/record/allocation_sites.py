"""Allocation sites: the module that runs, in forward and backward, for a recorder's notes.

Forward uses module hooks. Backward runs no modules, so the autograd node of each module's output gets the module's name
and a pre-hook, which fires just before backward enters that module. What runs next is attributed to it until another
node's hook fires: right to within an operator or two at a module's boundary.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from memo.allocator import AllocationSite
from memo.torch_private import current_graph_task_id

if TYPE_CHECKING:
    from torch.autograd.graph import Node
    from torch.utils.hooks import RemovableHandle

    from memo.swap import Layer

_FORWARD: Final = "forward"
_BACKWARD: Final = "backward"
_OPTIMIZER: Final = "optimizer"
_NAMED: Final = "memo_module"


class Sited(Protocol):
    """What is told the site: a recorder of allocations, or anything else that tells layers apart."""

    site: AllocationSite


class AllocationSites:
    """Context manager that sets `recorder.site` to the module that runs.

    Args:
        recorder: notes `site` with each allocation.
        model: its modules are hooked while this is entered.
        layers: layers whose passes are grouped, so that an allocation shows its layer and pass.
    """

    def __init__(self, recorder: Sited, model: nn.Module, layers: Sequence[Layer]) -> None:
        self._recorder = recorder
        self._model = model
        self._layers = {layer.name: layer for layer in layers}
        self._hooks: list[RemovableHandle] = []
        self._stack: list[AllocationSite] = []
        self._visits: collections.Counter[str] = collections.Counter()
        self.ran_backward = False
        """True once backward has reached a module."""

    def __enter__(self) -> AllocationSites:
        for name, module in self._model.named_modules():
            self._hooks += self._watch(name, self._layer_of(name), module)
        self._hooks.append(register_optimizer_step_pre_hook(lambda *_: self.phase(_OPTIMIZER)))
        return self

    def __exit__(self, *exception: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._stack.clear()

    def phase(self, name: Literal["forward", "backward", "optimizer"]) -> None:
        """Begins a phase of the step."""
        self._recorder.site = AllocationSite(phase=name)

    def _watch(self, name: str, layer: str, module: nn.Module) -> list[RemovableHandle]:
        def begin(_: nn.Module, args: object) -> None:
            before = self._recorder.site
            if before.phase != _FORWARD and not is_in_backward():
                # The next microbatch of a step that runs backward itself.
                before = AllocationSite(phase=_FORWARD)
            self._stack.append(before)
            group = before.group  # inside a layer, and in a recompute, the group of the pass that runs it
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
            return  # the output of an inner module, whose name is more precise
        notes[_NAMED] = reached.module

        def reach(_: object) -> None:
            self.ran_backward = True
            self._recorder.site = reached

        node.register_prehook(reach)

    def _layer_of(self, name: str) -> str:
        """Name of the layer that the module is or is part of; empty outside of the layers."""
        parts = name.split(".")
        prefixes = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
        return next((prefix for prefix in prefixes if prefix in self._layers), "")


def is_in_backward() -> bool:
    """True while autograd runs backward on this thread; modules that run then are recomputed."""
    return bool(current_graph_task_id() != -1)


def _group(layer: str, way: str, visit: int) -> str:
    """Name of one pass through one layer; each microbatch has passes of its own."""
    return f"{layer}.{way}" if visit == 1 else f"{layer}.{way}.{visit}"
