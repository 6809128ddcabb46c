"""ZeRO-3 in small: parameters whose memory is there only while their own module runs, as DeepSpeed's stage 3 has them.

Each parameter's values rest in a shard; hooks of every module that has parameters put gathered memory in place before its
forward and its backward, and an empty tensor after it. A product saves its parameter and not a view of it, since a view
would hold the gathered memory alive until backward.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn


class _Product(torch.autograd.Function):
    """A linear map that saves the parameter itself, whose memory backward finds gathered again."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t() + bias

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        return grad @ weight, rows.t() @ x.flatten(0, -2), rows.sum(0)


class Linear(nn.Linear):
    """nn.Linear with that product."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return _Product.apply(x, self.weight, self.bias)  # type: ignore[no-untyped-call,no-any-return]


class Gathered:
    """Takes the parameters of a model's modules away, and gathers them where they are needed.

    Args:
        model: its modules get hooks.
        keeps: parameters stay gathered after a forward until `release` is called.
    """

    def __init__(self, model: nn.Module, *, keeps: bool = False) -> None:
        self.memory: list[weakref.ref[torch.UntypedStorage]] = []
        """All that was ever gathered."""
        self._shards: dict[nn.Parameter, torch.Tensor] = {}
        self._keeps = keeps
        for module in model.modules():
            if any(True for _ in module.parameters(recurse=False)):
                self._hook(module)
        for parameter in model.parameters():
            self._shards[parameter] = parameter.data.clone()
        self.release()

    @property
    def alive(self) -> int:
        """Bytes of gathered memory that is still there."""
        return sum(storage.nbytes() for weak in self.memory if (storage := weak()) is not None)

    def release(self) -> None:
        """Takes all parameters away."""
        for parameter in self._shards:
            parameter.data = torch.empty(0)

    def _hook(self, module: nn.Module) -> None:
        own = list(module.parameters(recurse=False))
        module.register_forward_pre_hook(lambda *_: self._gather(own))
        module.register_forward_hook(lambda _, __, out: self._after(own, out))

    def _after(self, own: list[nn.Parameter], out: torch.Tensor) -> None:
        if not self._keeps:
            self._release(own)
        if out.grad_fn is not None:
            out.grad_fn.register_prehook(lambda _: self._gather(own))  # before the module's backward
        for parameter in own:
            if not hasattr(parameter, "gathers"):
                parameter.gathers = parameter.register_post_accumulate_grad_hook(lambda p: self._release([p]))  # type: ignore[attr-defined]

    def _gather(self, parameters: list[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter.numel() == 0:
                parameter.data = self._shards[parameter].clone()
                self.memory.append(weakref.ref(parameter.untyped_storage()))

    def _release(self, parameters: list[nn.Parameter]) -> None:
        for parameter in parameters:
            parameter.data = torch.empty(0)
