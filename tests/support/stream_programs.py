"""Programs on several CUDA streams, each ordered in itself: `python -m stream_programs NAME` runs one with memo.

Each returns the gradients of its steps, so that runs with and without memo can be compared to the last bit.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import memo

Gradients = list[torch.Tensor]
STEPS = 2


class Block(nn.Module):
    """A linear layer up, one down."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


class Blocks(nn.Module):
    """Six of them, and a loss."""

    def __init__(self, make: Callable[[], nn.Module] = lambda: Block(64)) -> None:
        super().__init__()
        self.layers = nn.ModuleList([make() for _ in range(6)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


class HalfBatches(Blocks):
    """Two half batches, layer by layer on two streams, as Domino and DualPipe overlap compute with communication."""

    def __init__(self) -> None:
        super().__init__()
        self.streams = [torch.cuda.Stream(), torch.cuda.Stream()]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        here, halves = torch.cuda.current_stream(), list(x.chunk(2))
        for stream in self.streams:
            stream.wait_stream(here)
        for layer in self.layers:
            for number, stream in enumerate(self.streams):
                with torch.cuda.stream(stream):
                    halves[number] = layer(halves[number])
        for half, stream in zip(halves, self.streams, strict=True):
            here.wait_stream(stream)
            half.record_stream(here)
        return sum((half.square().mean() for half in halves), torch.zeros((), device=x.device))


class Branches(nn.Module):
    """A layer with a branch on a side stream; both save the same input, and backward runs each on its own stream."""

    def __init__(self, side: torch.cuda.Stream, hidden: int = 64) -> None:
        super().__init__()
        self.side = side
        self.before, self.main, self.other = (nn.Linear(hidden, hidden) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.before(x).relu()
        main = torch.cuda.current_stream()
        self.side.wait_stream(main)
        with torch.cuda.stream(self.side):
            v = self.other(h)
            h.record_stream(self.side)
        u = self.main(h)
        main.wait_stream(self.side)
        v.record_stream(main)
        return x + u * 0.5 + v * 0.5


class SavedElsewhere(Branches):
    """The side stream alone saves what the main stream allocated, and autograd alone keeps it alive."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x * 2.0
        main = torch.cuda.current_stream()
        self.side.wait_stream(main)
        with torch.cuda.stream(self.side):
            v = self.other(h)
        main.wait_stream(self.side)
        v.record_stream(main)
        return x + v


def batch(number: int) -> torch.Tensor:
    return torch.randn(128, 64, generator=torch.Generator().manual_seed(number)).cuda().requires_grad_()


def gradients(model: nn.Module) -> Gradients:
    torch.cuda.synchronize()  # the program's: gradients of several streams are read on one
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def plain_steps(model: nn.Module, manager: Any) -> Gradients:
    done = []
    for step in range(STEPS):
        model.zero_grad()
        x = batch(step)
        with manager or contextlib.nullcontext():
            loss = model(x)
        loss.backward()
        done += gradients(model)
    return done


def microbatches(model: nn.Module, manager: Any) -> Gradients:
    """Two microbatches a step, each with its forward and backward on a stream of its own."""
    streams, done = [torch.cuda.Stream(), torch.cuda.Stream()], []
    for step in range(STEPS):
        model.zero_grad()
        here, losses = torch.cuda.current_stream(), []
        for number, stream in enumerate(streams):
            x = batch(2 * step + number)
            stream.wait_stream(here)
            with torch.cuda.stream(stream), manager or contextlib.nullcontext():
                losses.append(model(x))
        for stream, loss in zip(streams, losses, strict=True):
            with torch.cuda.stream(stream):
                loss.backward()
            torch.cuda.synchronize()  # gradients of the two are added one after the other
        done += gradients(model)
    return done


PROGRAMS: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module, Any], Gradients]]] = {
    "half_batches": (HalfBatches, plain_steps),
    "microbatches": (Blocks, microbatches),
    "branches": (lambda: _on_side(Branches), plain_steps),
    "saved_elsewhere": (lambda: _on_side(SavedElsewhere), plain_steps),
}


def _on_side(layer: Callable[[torch.cuda.Stream], nn.Module]) -> nn.Module:
    side = torch.cuda.Stream()
    return Blocks(lambda: layer(side))


def run(name: str, *, whole: list[str] | None = None, **offload: Any) -> Gradients:
    """The program's gradients; with memo where `offload` says how. The layers that move whole are added to `whole`."""
    make, steps = PROGRAMS[name]
    torch.manual_seed(0)
    model = make().cuda()
    torch.cuda.synchronize()
    manager = memo.offload(model, min_bytes=512, **offload) if offload else None
    try:
        return steps(model, manager)
    finally:
        if manager is not None:
            used = manager.report().recompute
            if whole is not None and used is not None:
                whole += used.refused
            manager.close()


if __name__ == "__main__":
    import cuda_sanitizer

    cuda_sanitizer.correct()
    run(sys.argv[1], alpha=1.0, host="64MiB")
    print("clean")
