"""Programs with two compute streams under the checking backend, and the proof that each edge between them is necessary."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from race_checker import CheckingBackend, Race
from small_models import Block, Checked, Stack, Step, assert_equal, checked, gradients, ids, stack, train
from torch import nn

from memo.swap import Level, Placement
from memo.swap.backends import Event
from memo.swap.engine import d2h, h2d
from memo.swap.engine.h2d import Reload
from memo.swap.engine.saved_storage import RETURNING, SavedStorage, by_home
from memo.swap.engine.stream_order import StreamOrder
from memo.swap.tiers import HostTier

POLICIES = ["lazy", "eager", "random"]


class _Backward(torch.autograd.Function):
    """From here on backward runs on the stream of its forward, as autograd has it on a GPU."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, streams: CheckingBackend, stream: int) -> torch.Tensor:
        ctx.streams, ctx.stream = streams, stream
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        ctx.streams.current = ctx.stream
        return *gradients, None, None


class OneStream:
    """What a program asks of its streams where nothing is checked."""

    def stream_context(self, stream: int) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def wait_for(self, stream: int) -> None:
        return None

    def allocates(self, tensor: torch.Tensor) -> None:
        return None

    def reads(self, tensor: torch.Tensor) -> None:
        return None


Streams = CheckingBackend | OneStream


def on(streams: Streams, stream: int, layer: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Forward and backward of `layer` on `stream`."""
    with streams.stream_context(stream):
        y = layer(x)
        return y if isinstance(streams, OneStream) else _Backward.apply(y, streams, stream)


class Branches(nn.Module):
    """A layer with two branches on two streams, which both save what is made before them."""

    streams: Streams = OneStream()

    def __init__(self, hidden: int = 32) -> None:
        super().__init__()
        self.before, self.one, self.other = (nn.Linear(hidden, hidden) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        streams = Branches.streams
        h = on(streams, 0, lambda x: self.before(x).relu(), x)
        with streams.stream_context(1):
            streams.wait_for(0)
        v = on(streams, 1, self.other, h)
        u = on(streams, 0, self.one, h)
        streams.wait_for(1)
        return on(streams, 0, lambda y: y.tanh(), x + u + v)


class SavedElsewhere(Branches):
    """What the second stream alone saves is memory of the first."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        streams = Branches.streams
        h = self.before(x) + 1.0
        streams.allocates(h)
        with streams.stream_context(1):
            streams.wait_for(0)
        v = on(streams, 1, lambda h: self.other(h), h)
        streams.wait_for(1)
        return x + v


class SavedLastElsewhere(Branches):
    """What a recompute computes last is on the second stream, out of memory of the first that nothing keeps."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        streams = Branches.streams
        h = self.before(x) * 2.0
        streams.allocates(h)
        with streams.stream_context(1):
            streams.wait_for(0)
            streams.reads(h)
        v = on(streams, 1, lambda h: h.sigmoid(), h)
        streams.wait_for(1)
        return x + v


class InputReadElsewhere(Branches):
    """The second stream asks first, so the layer runs again there, on an input that is memory of the first."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        streams = Branches.streams
        streams.reads(x)
        h = x * 2.0
        with streams.stream_context(1):
            streams.wait_for(0)
        v = on(streams, 1, lambda h: self.other(h.sigmoid().tanh()), h)
        streams.wait_for(1)
        return on(streams, 0, lambda y: y * 1.0, x * 0.5 + v)


def together(model: Stack, streams: Streams, step: int) -> torch.Tensor:
    """Two half batches, layer by layer on two streams."""
    halves = [model.embed(half) for half in ids(step, batch=4).chunk(2)]
    with streams.stream_context(1):
        streams.wait_for(0)
    for layer in model.layers:
        for stream in range(2):
            halves[stream] = on(streams, stream, layer, halves[stream])
    streams.wait_for(1)
    return sum((half.square().mean() for half in halves), torch.zeros(()))


def alone(model: Stack, streams: Streams, step: int) -> torch.Tensor:
    """A forward on the first stream, whatever its layers do."""
    return model(ids(step))


Program = Callable[[Stack, Streams, int], torch.Tensor]
PROGRAMS: dict[str, tuple[Program, Callable[[], nn.Module]]] = {
    "half batches": (together, lambda: Block(32, 2)),
    "branches": (alone, Branches),
    "saved elsewhere": (alone, SavedElsewhere),
    "saved last elsewhere": (alone, SavedLastElsewhere),
}


def microbatches(model: Stack, streams: Streams, manager: Any, steps: int) -> list[Step]:
    """Three microbatches a step, one on the first stream and two on the second, one of them forward behind a backward."""
    done = []
    for step in range(steps):
        losses: list[torch.Tensor] = []

        def forward(stream: int, step: int = step, losses: list[torch.Tensor] = losses) -> None:
            with streams.stream_context(stream), manager or contextlib.nullcontext():
                losses.append(model(ids(3 * step + len(losses))))

        def backward(stream: int, number: int, losses: list[torch.Tensor] = losses) -> None:
            with streams.stream_context(stream):
                losses[number].backward()

        forward(0)
        forward(1)
        backward(0, 0)
        forward(1)
        backward(1, 1)
        backward(1, 2)
        done.append(Step(torch.stack(losses).detach(), gradients(model)))
        model.zero_grad()
        meet(streams)
    return done


def meet(streams: Streams) -> None:
    """Each stream goes on after both."""
    for stream in range(2):
        with streams.stream_context(stream):
            streams.wait_for(1 - stream)


class Interrupted(Exception):
    """Raised in the middle of a forward."""


def interrupt(*_: object) -> None:
    raise Interrupted


def break_off(model: Stack, made: Checked, program: Program) -> None:
    """A forward that ends early: what its layers saved dies with its copies under way."""
    hook = model.layers[1].register_forward_pre_hook(interrupt)
    with made.manager, pytest.raises(Interrupted):
        program(model, made.backend, 7)
    hook.remove()
    gc.collect()
    made.backend.current = 0


def run(name: str, made: Checked, model: Stack, steps: int = 3) -> list[Step]:
    backend = made.backend
    if name == "microbatches":
        return microbatches(model, backend, made.manager, steps)
    program, _ = PROGRAMS[name]
    Branches.streams = backend
    done = []
    try:
        for step in range(steps):
            break_off(model, made, program)
            done += train(model, lambda _, step=step: program(model, backend, step), made.manager, steps=1)
            backend.current = 0
            meet(backend)
    finally:
        Branches.streams = OneStream()
    gc.collect()
    return done


def make(name: str) -> Stack:
    return stack(make=PROGRAMS[name][1]) if name in PROGRAMS else stack()


def plain(name: str, steps: int = 3) -> list[Step]:
    model, nowhere = make(name), OneStream()
    if name == "microbatches":
        return microbatches(model, nowhere, None, steps)
    program, _ = PROGRAMS[name]
    return [
        done
        for step in range(steps)
        for done in train(model, lambda _, step=step: program(model, nowhere, step), steps=1)
    ]


NAMES = [*PROGRAMS, "microbatches"]


@pytest.mark.covering(2)
@pytest.mark.parametrize("alpha", [1.0, 0.5])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_equal_on_two_streams_and_nothing_races(name: str, policy: str, alpha: float) -> None:
    want = plain(name)
    for seed in range(3 if policy == "random" else 1):
        model = make(name)
        made = checked(model, policy, seed=seed, alpha=alpha)
        assert_equal(run(name, made, model), want)
        assert made.backend.races == []
        made.manager.close()
        assert made.engine.stats.live_entries == 0
        assert made.engine.stats.device_bytes == 0
        assert made.engine.stats.bytes_reloaded > 0
        assert (made.engine.stats.bytes_recomputed > 0) == (alpha < 1)


def test_what_a_recompute_on_another_stream_reads_is_not_used_again_before_it_has() -> None:
    made = checked(model := stack(make=InputReadElsewhere), alpha=Level.SAVE_INPUT)
    made.engine.place({layer: Placement(kept=1.0) for layer in range(3)})
    Branches.streams = made.backend
    try:
        train(model, lambda step: alone(model, made.backend, step), made.manager, steps=1)
    finally:
        Branches.streams = OneStream()
    gc.collect()
    assert made.engine.stats.bytes_recomputed > 0
    assert made.backend.races == []
    made.manager.close()


def nothing(*_: object) -> None:
    return None


def by_the_other(storages: Iterable[SavedStorage]) -> dict[int, list[SavedStorage]]:
    return {1 - home: those for home, those in by_home(storages).items()}


def before_the_callers(order: StreamOrder, saved: SavedStorage) -> None:
    if saved.out is not None:
        order._backend.compute_wait(saved.out)


def limbo_of_the_callers(order: StreamOrder, saved: SavedStorage, event: Event) -> None:
    order._backend.compute_wait(event)


def first_user_alone(reload: Reload, saved: SavedStorage) -> None:
    if saved.state is RETURNING:
        reload._order.copied_back(saved)


def told_nobody(
    backend: CheckingBackend, buffer: torch.Tensor, stream: int | None = None, *, writes: bool = True
) -> None:
    """The allocator is not told of uses on another stream than a buffer's own."""
    backend.access(backend._ticking(backend.current if stream is None else stream), buffer, write=writes)


MUTANTS: dict[str, tuple[Any, str, Callable[..., Any], str, float]] = {
    "E1 of another stream": (d2h, "by_home", by_the_other, "microbatches", 1.0),
    "E2 of the caller's stream": (StreamOrder, "copied_out", before_the_callers, "half batches", 1.0),
    "E2 of a stream that does not own the memory": (StreamOrder, "_leaves", nothing, "saved elsewhere", 1.0),
    "E3 of another stream": (h2d, "by_home", by_the_other, "half batches", 1.0),
    "E4 for the first stream alone": (Reload, "hand_over", first_user_alone, "branches", 1.0),
    "E5 of the caller's stream": (StreamOrder, "abandoned", limbo_of_the_callers, "half batches", 1.0),
    "E6 left out": (StreamOrder, "taken_over", nothing, "branches", 0.5),
    "E7 left out": (HostTier, "_after_reloads", nothing, "microbatches", 1.0),
    "uses that the allocator is not told of": (CheckingBackend, "compute_uses", told_nobody, "branches", 1.0),
}


def caught(name: str, policy: str, alpha: float, seed: int) -> bool:
    model = make(name)
    made = checked(model, policy, alpha=alpha, seed=seed)
    try:
        run(name, made, model)
        made.manager.close()
    except (Race, RuntimeError):
        return True
    gc.collect()
    return bool(made.backend.races)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # races found while closing, too
@pytest.mark.parametrize("mutant", MUTANTS)
def test_each_edge_between_compute_streams_removed_is_caught(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    owner, edge, instead, name, alpha = MUTANTS[mutant]
    monkeypatch.setattr(owner, edge, instead)
    assert caught(name, "lazy", alpha, seed=0)
    gc.collect()  # the manager closes here, where what it finds is expected
