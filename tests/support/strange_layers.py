"""Layers that do what may happen once in a forward alone: they count, collect, draw, mix tokens or ask for numbers."""

from __future__ import annotations

import functools
import itertools
import random
from types import SimpleNamespace

import numpy
import torch
from small_models import SEQ
from torch import nn
from torch.nn import functional as F


class Layer(nn.Module):
    """An MLP with a hook for what a subclass does to its input. What it does is gated, and the gate starts closed."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.gate = nn.Parameter(torch.zeros(32))

    def strange(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def left(self) -> float:
        """A number that tells what its forwards have left behind."""
        return 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.gate * self.strange(x)
        return x + self.down(F.gelu(self.up(self.norm(x))))


class MeanOverTokens(Layer):
    def strange(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean(1, keepdim=True)


class Rolls(Layer):
    def strange(self, x: torch.Tensor) -> torch.Tensor:
        return torch.roll(x, 1, 1)


class Flips(Layer):
    def strange(self, x: torch.Tensor) -> torch.Tensor:
        return x.flip(1)


class Shifts(Layer):
    def strange(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x[:, :1], x[:, :-1]], 1)


class Scans(Layer):
    def strange(self, x: torch.Tensor) -> torch.Tensor:
        return x.cumsum(1)


class Convolves(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(32, 32, 3, padding=1)

    def strange(self, x: torch.Tensor) -> torch.Tensor:
        return self.conv(x.transpose(1, 2)).transpose(1, 2)  # type: ignore[no-any-return]


class CountsPositions(Layer):
    def strange(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.arange(x.size(1)).view(-1, 1)


class AsksForAShape(Layer):
    """Of a tensor without bytes."""

    def strange(self, x: torch.Tensor) -> torch.Tensor:
        return x * (torch.empty(x.shape, device="meta") + 1).sum(-1, keepdim=True).shape[-1]


class LearnsPositions(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.positions = nn.Parameter(torch.zeros(SEQ, 32))

    def strange(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x + self.positions[: x.size(1)])


class DividesByLength(Layer):
    def strange(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x / x.size(1))


class NormalisesOverTheBatch(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(32)

    def strange(self, x: torch.Tensor) -> torch.Tensor:
        return self.batch_norm(x.transpose(1, 2)).transpose(1, 2)  # type: ignore[no-any-return]


class Counts(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def strange(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.add_(1)  # type: ignore[operator, union-attr]
        return x.sin()

    def left(self) -> float:
        return float(self.calls)  # type: ignore[arg-type]


class CountsInPython(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def strange(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x.sin()

    def left(self) -> float:
        return self.calls


class ChangesItsInput(Layer):
    def strange(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(1.5).sin()


class Asks(Layer):
    def strange(self, x: torch.Tensor) -> torch.Tensor:
        return x.sin() if x.max() > 0 else x.cos()


class PicksExperts(Layer):
    """Each token goes to one of two experts; tokens are gathered by expert."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(32, 2)
        self.experts = nn.ModuleList([nn.Linear(32, 32), nn.Linear(32, 32)])

    def strange(self, x: torch.Tensor) -> torch.Tensor:
        flat = x.flatten(0, 1)
        choice = self.router(flat).argmax(-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows = (choice == number).nonzero().squeeze(-1)
            out = out.index_add(0, rows, expert(flat[rows]))
        return out.view_as(x)


class DrawsNoise(Layer):
    def strange(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn_like(x)


class DrawsNoiseOfAShape(Layer):
    def strange(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.randn(x.shape)


class DrawsFromItsOwn(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator().manual_seed(1)

    def strange(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rand(x.shape, generator=self.generator)

    def left(self) -> float:
        return torch.rand((), generator=self.generator).item()


class DrawsWithPython(Layer):
    def strange(self, x: torch.Tensor) -> torch.Tensor:
        return (x * random.random()).sin()


class ShiftsInPlace(Layer):
    def strange(self, x: torch.Tensor) -> torch.Tensor:
        shifted = torch.ones_like(x)
        shifted[:, 1:] += (self.gate * x)[:, :-1]
        return shifted.sin()


class ReadsANumber(Layer):
    def strange(self, x: torch.Tensor) -> torch.Tensor:
        return (x * (1 + (self.gate * x).mean().item())).sin()


class ScalesByLength(Layer):
    """Where the gate is closed, one length is as good as another."""

    def strange(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.gate * x / x.size(1)) + x.sin()


class JoinsNothing(Layer):
    def strange(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.cat([x[..., :0], x[..., :0]], -1).sum()


class PutsAside(Layer):
    """What it puts aside is of the graph, and the model's to find."""

    def strange(self, x: torch.Tensor) -> torch.Tensor:
        self.aside = x.sin()
        return self.aside * x

    def left(self) -> float:
        return self.aside.sum().item() if hasattr(self, "aside") else 0.0


class Collects(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = []

    def strange(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(x.sin())
        return self.seen[-1] * len(self.seen)

    def left(self) -> float:
        return len(self.seen)


class KeepsBooks(Layer):
    """In an object that is no module."""

    def __init__(self) -> None:
        super().__init__()
        self.books = SimpleNamespace(calls=0)

    def strange(self, x: torch.Tensor) -> torch.Tensor:
        self.books.calls += 1
        return x * self.books.calls

    def left(self) -> float:
        return self.books.calls


class CollectsDeep(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[str, tuple[list[float], ...]] = {"means": ([],)}

    def strange(self, x: torch.Tensor) -> torch.Tensor:
        means = self.seen["means"][0]
        means.append(0.0)
        return x * len(means)

    def left(self) -> float:
        return len(self.seen["means"][0])


class DrawsFromPythons(Layer):
    """From a generator of Python's that is its own."""

    def __init__(self) -> None:
        super().__init__()
        self.draws = random.Random(1)

    def strange(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.draws.random()

    def left(self) -> float:
        return self.draws.random()


class DrawsFromNumPys(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.draws = numpy.random.default_rng(1)

    def strange(self, x: torch.Tensor) -> torch.Tensor:
        return x * float(self.draws.random())

    def left(self) -> float:
        return float(self.draws.random())


class CountsOn(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = itertools.count(1)

    def strange(self, x: torch.Tensor) -> torch.Tensor:
        return x * next(self.numbers)

    def left(self) -> float:
        return next(self.numbers)


class CountsForAll(Layer):
    calls_of_all = 0

    def strange(self, x: torch.Tensor) -> torch.Tensor:
        CountsForAll.calls_of_all += 1
        return x.sin()

    def left(self) -> float:
        return CountsForAll.calls_of_all


_ASIDE: list[torch.Tensor] = []


class PutsIntoAGlobal(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        _ASIDE[:] = [x.sin()]
        return super().forward(x)

    def strange(self, x: torch.Tensor) -> torch.Tensor:
        return _ASIDE[0]

    def left(self) -> float:
        held = len(_ASIDE)
        _ASIDE.clear()
        return held


def _count_in_a_global() -> None:
    _CALLS["calls"] += 1


_CALLS = {"calls": 0}


class CountsByAFunction(Layer):
    def strange(self, x: torch.Tensor) -> torch.Tensor:
        _count_in_a_global()
        return x.sin()

    def left(self) -> float:
        return _CALLS["calls"]


class CountsInAClosure(Layer):
    def __init__(self) -> None:
        super().__init__()
        calls = 0

        def scaled(x: torch.Tensor) -> torch.Tensor:
            nonlocal calls
            calls += 1
            return x * calls

        self.scaled = scaled

    def strange(self, x: torch.Tensor) -> torch.Tensor:
        return self.scaled(x)

    def left(self) -> float:
        return self.scaled.__closure__[0].cell_contents  # type: ignore[index, no-any-return]


def _times_length(seen: list[int], x: torch.Tensor) -> torch.Tensor:
    seen.append(1)
    return x * len(seen)


class CountsInAPartial(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.scaled = functools.partial(_times_length, [])

    def strange(self, x: torch.Tensor) -> torch.Tensor:
        return self.scaled(x)

    def left(self) -> float:
        return len(self.scaled.args[0])


class _Books:
    def __init__(self) -> None:
        self.calls = 0

    def count(self) -> None:
        self.calls += 1


_BOOKS = _Books()


class CountsInAGlobalObject(Layer):
    def strange(self, x: torch.Tensor) -> torch.Tensor:
        _BOOKS.count()
        return x.sin()

    def left(self) -> float:
        return _BOOKS.calls


class CountsByAGenerator(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.numbers = (number for number in range(1, 1000))

    def strange(self, x: torch.Tensor) -> torch.Tensor:
        return x * next(self.numbers)

    def left(self) -> float:
        return next(self.numbers)


class AttendsByHand(Layer):
    def strange(self, x: torch.Tensor) -> torch.Tensor:
        return ((x @ x.transpose(1, 2)) / 6).softmax(-1) @ x


class Swaps(Layer):
    """Batch and tokens change places: with two sequences of two tokens nothing but the axis tells them apart."""

    def strange(self, x: torch.Tensor) -> torch.Tensor:
        return x.transpose(0, 1).reshape(x.shape).sin()


STRANGE: tuple[type[Layer], ...] = (
    MeanOverTokens,
    Rolls,
    Flips,
    Shifts,
    Scans,
    Convolves,
    CountsPositions,
    AsksForAShape,
    LearnsPositions,
    DividesByLength,
    NormalisesOverTheBatch,
    Counts,
    ChangesItsInput,
    Asks,
    PicksExperts,
    DrawsNoise,
    DrawsNoiseOfAShape,
    DrawsFromItsOwn,
    DrawsWithPython,
    ShiftsInPlace,
    ReadsANumber,
    ScalesByLength,
    JoinsNothing,
    PutsAside,
    Collects,
    AttendsByHand,
    Swaps,
    KeepsBooks,
    CollectsDeep,
    DrawsFromPythons,
    DrawsFromNumPys,
    CountsOn,
    CountsForAll,
    PutsIntoAGlobal,
    CountsInPython,
    CountsByAFunction,
    CountsInAClosure,
    CountsInAPartial,
    CountsInAGlobalObject,
    CountsByAGenerator,
)
