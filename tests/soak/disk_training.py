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


class Layer(nn.Module):
    """Element-wise operators that each save their input, and compute next to nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH) / 2 + 1.2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Shape (tokens, width), as its input."""
        return functional.hardtanh(functional.hardswish(functional.leaky_relu(x * self.scale)))


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
        """Losses of all microbatches, and CRC-32 of gradients and of the weights after the update.

        The weights are those before that step, turn 1's those after turn 0, which runs first.
        """
        self.optimizer.zero_grad()
        self.model.load_state_dict(self._starts[turn])
        losses = []
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
        return (*losses, crc, _crc(list(self.model.parameters())))


def _crc(tensors: Sequence[torch.Tensor | None]) -> int:
    found = 0
    for tensor in tensors:
        assert tensor is not None, "every parameter has a gradient"
        found = zlib.crc32(tensor.detach().numpy(), found)
    return found
