"""Layers that send tokens to experts: whole storages are kept or replayed, whatever rows each call's experts get."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from routed_layers import GroupedExperts
from small_models import assert_equal, checked, gradients, ids, plain, stack, train
from torch import nn

import memo
from memo.swap.recompute.tape.plan import Plan


def routed(*, behind: bool = False) -> nn.Module:
    return stack(make=lambda: GroupedExperts(behind=behind))


def plan_of(manager: memo.Manager, layer: int = 0) -> Plan:
    assert manager._recompute_policy is not None
    last = manager._recompute_policy._plans.last(f"layers.{layer}")
    assert last is not None
    assert isinstance(last[2], Plan)
    return last[2]


@pytest.mark.covering(1)
@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize(
    "alpha",
    [0.2, 0.5, 0.8, (0.25, 0.5, 0.25), 0.0, 0.4],
    ids=str,
)
def test_gradients_are_equal_while_routing_changes(
    offload: Callable[..., memo.Manager], alpha: Any, behind: bool
) -> None:
    model = routed(behind=behind)
    manager = offload(model, alpha=alpha, min_bytes=1)
    assert_equal(train(model, lambda step: model(ids(step)), manager), plain(lambda: routed(behind=behind)))
    assert plan_of(manager).steps


def test_choices_of_experts_are_kept(offload: Callable[..., memo.Manager]) -> None:
    """A replay takes the same path: indices, and the order of the rows, are never made again."""
    model = routed()
    manager = offload(model, alpha=0.4, min_bytes=1)
    train(model, lambda step: model(ids(step)), manager)
    steps, plan = plan_of(manager).tape.steps, plan_of(manager)
    assert not {steps[number].name for number in plan.steps} & {"aten.topk", "aten.sort"}
    assert any(step.name == "aten.topk" for step in steps)


@pytest.mark.parametrize("behind", [False, True])
def test_bytes_follow_alpha(offload: Callable[..., memo.Manager], behind: bool) -> None:
    moved = {}
    for alpha in (0.0, 0.25, 0.5, 0.75, 1.0):
        model = routed(behind=behind)
        manager = offload(model, alpha=alpha, min_bytes=1)
        train(model, lambda step: model(ids(step)), manager, steps=2)  # noqa: B023
        before = manager.stats.bytes_disk
        with manager:
            model(ids(9))
        moved[alpha] = manager.stats.bytes_disk - before
        manager.close()
    between = moved[1.0] - moved[0.0]
    for alpha in (0.25, 0.5, 0.75):
        assert moved[0.0] < moved[alpha] <= (moved[0.0] + alpha * between) * 1.001
    assert moved[0.25] < moved[0.5] < moved[0.75]
    assert moved[0.0] < moved[1.0] / 2


def test_a_planner_is_told_the_curve_of_such_a_layer(offload: Callable[..., memo.Manager]) -> None:
    model = routed()
    manager = offload(model, alpha=0.5, min_bytes=1)
    train(model, lambda step: model(ids(step)), manager)
    tapes, told = manager._recompute_policy, manager.explain(0)
    assert tapes is not None
    costs = next(costs for costs in tapes.costs() if costs.layer == "layers.0")
    assert {point.saved_bytes for point in costs.points} <= {point.kept_nbytes for point in told.points}


@pytest.mark.covering(1)
@pytest.mark.parametrize("policy", ["lazy", "eager", "random"])
@pytest.mark.parametrize("alpha", [0.25, 0.6, (0.25, 0.5, 0.25)], ids=str)
def test_their_copies_race_with_nothing(policy: str, alpha: Any) -> None:
    model = routed(behind=True)
    made = checked(model, policy, tier="disk", alpha=alpha, seed=7)
    got = train(model, lambda step: model(ids(step)), made.manager)
    assert_equal(got, plain(lambda: routed(behind=True)))
    assert plan_of(made.manager, 1).steps
    made.manager.close()
    assert made.backend.races == []
    assert made.manager.stats.device_bytes == 0


def test_a_second_backward_recomputes_nothing_and_is_equal() -> None:
    model = routed(behind=True)
    made = checked(model, alpha=0.3)
    train(model, lambda step: model(ids(step)), made.manager, steps=1)
    model.load_state_dict(routed(behind=True).state_dict())
    with made.manager:
        loss = model(ids())
    before = made.manager.stats.bytes_recomputed
    loss.backward(retain_graph=True)
    first, recomputed = gradients(model), made.manager.stats.bytes_recomputed
    assert recomputed > before
    model.zero_grad()
    loss.backward()
    assert made.manager.stats.bytes_recomputed == recomputed
    reference = routed(behind=True)
    reference(ids()).backward()
    for ours, theirs in zip(first, gradients(reference), strict=True):
        assert ours is not None
        assert theirs is not None
        assert torch.equal(ours, theirs)


def test_a_graph_without_backward_frees_everything() -> None:
    model = routed(behind=True)
    made = checked(model, alpha=0.3)
    train(model, lambda step: model(ids(step)), made.manager)
    with made.manager:
        loss = model(ids())
    assert made.manager.stats.live_entries > 0
    del loss
    assert made.manager.stats.live_entries == 0
    made.manager.close()
