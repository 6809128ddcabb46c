"""The training of a disk hour: much is saved for backward and little computed; two steps that repeat."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from memo.manager import Manager

LAYERS, TOKENS, WIDTH = 16, 4096, 1024
"""Each layer saves four float32 tensors of 16 MiB, a microbatch 1 GiB."""


class _Watched(torch.autograd.Function):
    """Zero, whose backward compares the bits of tensors with those in forward: gradients alone do not show each bit."""

    changed = 0
    """Tensors that came back with other bits."""

    @staticmethod
    def forward(ctx: Any, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*tensors)
        ctx.sums = [_sum_of_bits(tensor) for tensor in tensors]
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        pairs = zip(ctx.saved_tensors, ctx.sums, strict=True)
        _Watched.changed += sum(_sum_of_bits(tensor) != before for tensor, before in pairs)
        return (None,) * len(ctx.sums)


def _sum_of_bits(tensor: torch.Tensor) -> int:
    return int(tensor.detach().view(torch.int32).sum())


class Layer(nn.Module):
    """Element-wise operators that each save their input, and compute next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH) / 2 + 1.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (tokens, width), as its input."""
        scaled = x * self.scale
        leaky = functional.leaky_relu(scaled)
        swish = functional.hardswish(leaky)
        return functional.hardtanh(swish).add_(_Watched.apply(x, scaled, leaky, swish))


class Model(nn.Module):
    """The layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x: torch.Tensor, *, checkpointed: bool = False) -> torch.Tensor:
        """Mean square of the last layer's output."""
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False) if checkpointed else layer(x)
        return x.square().mean()


class Training:
    """Two steps of SGD from the same start, again and again."""

    def __init__(self, seed: int, microbatches: int) -> None:
        torch.manual_seed(seed)
        self.model = Model()
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self._microbatches = microbatches
        self._starts = [self._weights()]

    def _weights(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.model.state_dict().items()}

    def run(self, turn: int, manager: Manager | None) -> tuple[Any, ...]:
        """Losses of all microbatches, CRC-32 of gradients and of the weights after the update, and tensors with other bits.

        The weights are those before that step, turn 1's those after turn 0, which runs first.
        """
        self.optimizer.zero_grad()
        self.model.load_state_dict(self._starts[turn])
        losses, _Watched.changed = [], 0
        for number in range(self._microbatches):
            generator = torch.Generator().manual_seed(number)
            x = torch.rand(TOKENS, WIDTH, generator=generator)
            if manager is None:
                loss = self.model(x, checkpointed=True)
            else:
                with manager:
                    loss = self.model(x)
            del x
            loss.backward()
            losses.append(loss.item())
        crc = _crc([parameter.grad for parameter in self.model.parameters()])
        self.optimizer.step()
        if len(self._starts) == 1:
            self._starts.append(self._weights())
        return (*losses, crc, _crc(list(self.model.parameters())), _Watched.changed)


def _crc(tensors: Sequence[torch.Tensor | None]) -> int:
    found = 0
    for tensor in tensors:
        assert tensor is not None, "every parameter has a gradient"
        found = zlib.crc32(tensor.detach().numpy(), found)
    return found
