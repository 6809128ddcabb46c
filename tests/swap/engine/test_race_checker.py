"""The engine under the checking backend, and the proof that each of its ordering edges is necessary."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import pytest
import torch
from race_checker import CheckingBackend, Past, Race
from small_models import Checked, Stack, Step, assert_equal, checked, ids, stack, train

from memo.swap.engine.stream_order import StreamOrder

if TYPE_CHECKING:
    pass

POLICIES = ["lazy", "eager", "random"]
TIERS = ["host", "disk"]


class Interrupted(Exception):
    """Raised in the middle of a pass."""


def interrupt(*_: object) -> None:
    raise Interrupted


def run(model: Stack, made: Checked, steps: int = 3) -> list[Step]:
    """Steps, each after a forward and a backward that are broken off while copies run: the limbo must see use too."""
    done: list[Step] = []
    for step in range(steps):
        hook = model.layers[1].register_forward_hook(interrupt)
        with made.manager, pytest.raises(Interrupted):
            model(ids(50 + step))
        hook.remove()
        with made.manager:
            loss = model(ids(50 + step))
        hook = model.layers[2].norm1.weight.register_hook(interrupt)
        with pytest.raises(Interrupted):
            loss.backward()
        hook.remove()
        del loss
        model.zero_grad()
        done += train(model, lambda _, step=step: model(ids(step)), made.manager, steps=1)
    gc.collect()
    return done


def plain(model: Stack, steps: int = 3) -> list[Step]:
    return [step for n in range(steps) for step in train(model, lambda _, n=n: model(ids(n)), steps=1)]


@pytest.mark.covering(1)
@pytest.mark.promise("R10")
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("policy", POLICIES)
def test_gradients_are_equal_under_every_schedule_and_nothing_races(policy: str, tier: str) -> None:
    want = plain(stack())
    for seed in range(5 if policy == "random" else 1):
        model = stack()
        made = checked(model, policy, tier=tier, seed=seed)
        assert_equal(run(model, made), want)
        assert made.backend.races == []
        made.manager.close()
        assert made.engine.stats.live_entries == 0
        assert made.engine.stats.device_bytes == 0
        assert all(room.used == 0 for room in made.engine.tiers)
        assert made.engine.stats.bytes_reloaded > 0


def nothing(*_: object) -> None:
    return None


def long_ago(*_: object) -> Past:
    return Past()


# Each edge of memo.swap.engine.stream_order, and what stands in for it when it is taken out.
EDGES = {
    "written": long_ago,
    "copied_out": nothing,
    "allocated": long_ago,
    "copied_back": nothing,
    "in_flight": nothing,
    "abandoned": nothing,
}
BETWEEN_COMPUTE_STREAMS = {"taken_over"}
"""Needed by programs with several of them alone: test_compute_streams."""
# With copies done at once nothing is in flight when a graph is dropped: no limbo is needed there; with some of them, seldom.
NEVER_MISSED = {"in_flight": ["lazy", "random"], "abandoned": ["lazy"]}
MUTANTS = [(edge, policy) for edge in EDGES for policy in NEVER_MISSED.get(edge, POLICIES)]


def test_no_edge_is_left_out_of_what_is_proven_necessary() -> None:
    assert {name for name in vars(StreamOrder) if not name.startswith("_")} == EDGES.keys() | BETWEEN_COMPUTE_STREAMS


def caught(model: Stack, made: Checked) -> bool:
    """Whether the checking backend saw anything; gradients are not looked at."""
    try:
        run(model, made)
    except (Race, RuntimeError):
        return True
    gc.collect()
    return bool(made.backend.races)


@pytest.mark.promise("R5")
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # races found while closing, too
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize(("edge", "policy"), MUTANTS)
def test_each_ordering_edge_removed_is_caught(
    edge: str, policy: str, tier: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(StreamOrder, edge, EDGES[edge])
    model = stack()
    assert caught(model, checked(model, policy, tier=tier))
    gc.collect()  # the manager closes here, where what it finds is expected


def test_a_copy_of_freed_memory_is_a_race() -> None:
    backend = CheckingBackend("lazy")
    source, target = torch.zeros(8, dtype=torch.uint8), backend.empty(8)
    backend.d2h.wait(backend.compute_event())
    event = backend.d2h.copy(target, source)
    del source
    with pytest.raises(Race, match="freed before the copy ran"):
        event.synchronize()


def test_fresh_memory_reads_as_nan() -> None:
    assert CheckingBackend().empty(16).view(torch.float32).isnan().all()


@pytest.mark.parametrize("tier", TIERS)
def test_a_storage_saved_again_while_its_dead_predecessor_is_still_copied_is_a_new_life(tier: str) -> None:
    """The last handle dies with the copy in flight and the storage lives on: nobody may be given what is in limbo."""

    class Twice(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            held = x.detach() + 1.0
            torch.exp(self.linear(held))  # saves `held`; its graph dies at once, its copy does not
            gc.collect()
            return x + torch.tanh(self.linear(held))  # saves `held` again

    def make() -> Stack:
        return stack(make=Twice)

    model, reference = make(), make()
    made = checked(model, "lazy", tier=tier)
    got = train(model, lambda step: model(ids(step)), made.manager)
    assert_equal(got, train(reference, lambda step: reference(ids(step))))
    assert made.backend.races == []
    made.manager.close()
    assert made.engine.stats.live_entries == 0
    assert made.engine.stats.device_bytes == 0
    assert all(room.used == 0 for room in made.engine.tiers)
