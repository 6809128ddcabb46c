"""In which order backward is expected to come to the calls of layers: told by a schedule, seen in a step, or guessed."""

from __future__ import annotations

import gc
from collections.abc import Sequence

import pytest
import torch
from race_checker import CheckingBackend, Policy
from small_models import Stack, ids, stack

from memo.manager import Manager
from memo.swap import Engine, Group, RecomputePolicy, find_layers, setting_of
from memo.swap.engine.layer_calls import Call, LayerCalls
from memo.swap.engine.saved_storage import AWAY
from memo.swap.tiers import HostTier

LAYERS = 3


def begun(groups: LayerCalls, calls: int, layers: int = LAYERS) -> dict[Call, Group]:
    """As many forwards, each saving something in every layer."""
    made = {}
    for _ in range(calls):
        for layer in range(layers):
            group = groups.begin(layer, f"layers.{layer}", wait_for_next=False)
            group.alive = 1
            made[group.key] = group
    return made


def first_in_first_out(calls: int) -> list[Call]:
    return [(layer, call) for call in range(calls) for layer in reversed(range(LAYERS))]


def keys(groups: LayerCalls, group: Group) -> list[Call]:
    return [after.key for after in groups.after(group)]


def test_where_nothing_is_known_backward_goes_back_through_the_forwards() -> None:
    groups = LayerCalls()
    made = begun(groups, 2)
    groups.reached(made[1, 1])
    assert keys(groups, made[1, 1]) == [(0, 1), (2, 0), (1, 0), (0, 0)]


def test_what_a_schedule_says_holds_from_the_first_step_on() -> None:
    groups = LayerCalls()
    groups.expect(first_in_first_out(2))
    made = begun(groups, 2)
    groups.reached(made[2, 0])
    assert keys(groups, made[2, 0]) == [(1, 0), (0, 0), (2, 1), (1, 1), (0, 1)]


def test_nothing_is_expected_beyond_a_call_that_is_still_to_be_made() -> None:
    groups = LayerCalls()
    groups.expect(first_in_first_out(2))
    made = begun(groups, 1)
    groups.reached(made[1, 0])
    assert keys(groups, made[1, 0]) == [(0, 0)]


@pytest.mark.promise("R7")
def test_the_step_before_is_expected_again_and_says_more_than_the_schedule() -> None:
    groups = LayerCalls()
    groups.expect(first_in_first_out(2))
    made = begun(groups, 2)
    for key in reversed(first_in_first_out(2)):
        groups.reached(made[key])
    groups.end_step()
    made = begun(groups, 2)
    groups.reached(made[0, 1])
    assert keys(groups, made[0, 1]) == [(1, 1), (2, 1), (0, 0), (1, 0), (2, 0)]


def test_a_call_that_backward_comes_to_twice_is_expected_at_both_its_places() -> None:
    """A backward in two halves: layer inputs of both microbatches, then weights of both."""
    halves = [*first_in_first_out(2), *first_in_first_out(2)]
    groups = LayerCalls()
    groups.expect(halves)
    made = begun(groups, 2)
    for at, key in enumerate(halves):
        groups.reached(made[key])
        assert keys(groups, made[key]) == halves[at + 1 :] or at == len(halves) - 1


def test_a_step_that_leaves_the_course_finds_back_to_it() -> None:
    groups = LayerCalls()
    groups.expect(first_in_first_out(1))
    made = begun(groups, 1, layers=4)
    groups.reached(made[3, 0])  # nobody expected a fourth layer
    assert keys(groups, made[3, 0]) == [(2, 0), (1, 0), (0, 0)]
    groups.reached(made[2, 0])
    assert keys(groups, made[2, 0]) == [(1, 0), (0, 0)]


def test_a_group_comes_again_only_where_another_comes_between() -> None:
    groups = LayerCalls()
    groups.expect([(2, 0), (1, 0), (2, 0), (1, 0), (0, 0), (1, 0)])
    made = begun(groups, 1)
    came_again = []
    before = None
    for key in [(2, 0), (1, 0), (2, 0), (1, 0), (0, 0), (1, 0)]:
        groups.reached(made[key])
        came_again.append(before is not None and groups.comes_again(before))
        before = made[key]
    # 2 is left for 1 and is next, 1 for 2 and is next, 2 is over, 1 is left for 0 and is next, 0 is over.
    assert came_again == [False] * 6
    groups.end_step()
    groups.expect([(2, 0), (1, 0), (0, 0), (2, 0)])
    made = begun(groups, 1)
    groups.reached(made[2, 0])
    groups.reached(made[1, 0])
    assert groups.comes_again(made[2, 0])
    assert not groups.comes_again(made[1, 0])


def managed(model: Stack, *, alpha: float) -> Manager:
    backend = CheckingBackend("eager")
    engine = Engine(backend, [HostTier(backend, 1 << 24, segment_bytes=1 << 20)], min_bytes=512)
    return Manager(model, find_layers(model), engine, recompute_policy=RecomputePolicy(engine, setting_of(alpha)))


def microbatches(model: Stack, manager: Manager, order: Sequence[int]) -> None:
    """All forwards, then the backwards in this order."""
    with manager:
        losses = [model(ids(number)) for number in order]
    for number in order:
        losses[number].backward()
    model.zero_grad(set_to_none=True)
    gc.collect()


@pytest.mark.promise("P3")
def test_with_the_order_told_nothing_is_reloaded_late_even_in_the_first_step() -> None:
    """Microbatches backwarded first in, first out: the guess reloads the wrong one at each turn.

    What the very first backward wants is on its way before the last forward has ended.
    """

    def reloaded_late(order: list[Call] | None) -> list[int]:
        """In two steps: storages that were still away when backward came to their layer."""
        model = stack(layers=LAYERS)
        manager = managed(model, alpha=1.0)
        if order is not None:
            manager._engine.expect(order)
        groups = manager._engine._layer_calls
        late: list[int] = []
        reached = groups.reached

        def count(group: Group) -> None:
            late[-1] += sum(saved.state is AWAY for saved in group.living())
            reached(group)

        groups.reached = count  # type: ignore[method-assign]
        for _ in range(2):
            late.append(0)
            microbatches(model, manager, range(4))
        manager.close()
        return late

    guessed, told = reloaded_late(None), reloaded_late(first_in_first_out(4))
    assert told == [0, 0]
    assert guessed[0] > guessed[1] == 0


def test_what_is_computed_again_takes_no_memory_before_backward_comes_to_its_layer() -> None:
    """On the device: the layer at work whole, and of the one behind or before it only what moves at alpha 0."""
    model = stack(layers=6)
    manager = managed(model, alpha=0.0)
    for step in range(2):
        with manager:
            loss = model(ids(step))
        loss.backward()
    costs = manager.levels_profile()[2]
    saved = {point.name: point.saved_bytes for point in costs.points}
    assert saved["attention"] < 0.3 * saved["all"]
    assert manager.stats.peak_device_bytes <= 1.1 * (saved["all"] + 2 * saved["attention"])
    manager.close()


@pytest.mark.parametrize("policy", ["lazy", "eager", "random"])
def test_between_two_backwards_through_one_graph_the_device_holds_no_more_than_within_one(policy: Policy) -> None:
    """From the second step on it is known that backward comes twice; what it brought back goes away in between."""

    def both(model: Stack, step: int) -> list[torch.Tensor]:
        loss = model(ids(step))
        first = torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        return [*first, *torch.autograd.grad(loss, list(model.parameters()))]

    model = stack(layers=6)
    backend = CheckingBackend(policy)
    engine = Engine(backend, [HostTier(backend, 1 << 24, segment_bytes=1 << 20)], min_bytes=512)
    manager = Manager(model, find_layers(model), engine)
    peaks = []
    for step in range(2):
        manager.stats.restart_peak()
        with manager:
            got = both(model, step)
        peaks.append(manager.stats.restart_peak())
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(got, both(model, step), strict=True))
    assert backend.races == []
    assert peaks[1] < 0.6 * peaks[0]
    assert (manager.stats.live_entries, manager.stats.device_bytes) == (0, 0)
    manager.close()


def test_the_last_layer_of_a_microbatch_that_waits_its_turn_keeps_nothing_that_is_computed_again() -> None:
    """In a pipeline backward comes to an earlier microbatch first: until then a plan counts what moves alone."""
    held = {}
    for order in ((0, 1), (1, 0)):
        model = stack(layers=LAYERS)
        manager = managed(model, alpha=0.0)
        for _ in range(2):  # the first step shows the order of the second
            with manager:
                losses = [model(ids(number)) for number in range(2)]
            last = next(group for group in manager._engine._layer_calls if group.key == (LAYERS - 1, 1))
            held[order] = sum(saved.nbytes for saved in last.living() if saved.replay and saved.source is not None)
            for number in order:
                losses[number].backward()
            model.zero_grad(set_to_none=True)
            del losses, last
            gc.collect()
        manager.close()
    assert held[0, 1] == 0 < held[1, 0]
