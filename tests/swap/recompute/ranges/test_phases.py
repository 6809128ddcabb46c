"""Phases: tokens are divided around what mixes them, and that is replayed whole, by the same operators, or kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from routed_layers import GroupedExperts
from small_models import SEQ, assert_equal, checked, gradients, ids, plain, stack, train
from taped import Taped, record
from torch import nn
from torch.nn import functional as F

import memo
from memo.swap.recompute.explanation import Fate
from memo.swap.recompute.ranges.phases import Phase, phases_of
from memo.swap.recompute.ranges.ranged_plan import RangedPlan
from memo.swap.recompute.ranges.ranged_replay import RangedReplay
from memo.swap.recompute.ranges.rows import TokenRows, readings_of
from memo.swap.recompute.tape.bans import banned
from memo.swap.recompute.tape.replay import Replay
from memo.swap.token_levels import Level, TokenLevels

TOKENS, WIDTH = 48, 16


def phases(taped: Taped) -> tuple[TokenRows, list[Phase]]:
    rows = next(iter(readings_of(taped.tape, taped.recorder.carried)))
    return rows, phases_of(rows, banned(taped.tape, Level.SAVE_ATTENTION), taped.wanted)


def makers(taped: Taped, phase: Phase) -> list[str]:
    """Operators that made the storages of a phase."""
    contents = [taped.tape.contents[taped.tape.last[storage]] for storage in phase.storages]
    return [taped.tape.steps[content.writer].name.removeprefix("aten.") for content in contents]


def test_what_mixes_tokens_is_a_phase_between_divided_ones() -> None:
    first, second = (nn.Parameter(torch.randn(WIDTH, WIDTH)) for _ in range(2))

    def layer(x: torch.Tensor) -> torch.Tensor:
        return F.linear(F.linear(x, first).exp().flip(1).tanh(), second).sin().exp()

    taped = record(layer, torch.randn(2, TOKENS, WIDTH, requires_grad=True))
    _, found = phases(taped)
    assert [phase.is_divided for phase in found] == [True, False, True]
    assert [makers(taped, phase) for phase in found] == [["exp"], ["tanh"], ["mm", "exp"]]


def test_a_divided_phase_begins_again_with_a_product() -> None:
    """What is pointwise alone stays with what mixed the tokens."""
    taped = record(lambda x: x.exp().flip(1).tanh().sin().exp(), torch.randn(2, TOKENS, WIDTH, requires_grad=True))
    _, found = phases(taped)
    assert [phase.is_divided for phase in found] == [True, False]


def test_what_reads_an_unsaved_result_of_a_whole_phase_belongs_to_it() -> None:
    """A frozen weight does not have its product's input saved, and a range could not find it."""
    frozen = torch.randn(WIDTH, WIDTH)
    taped = record(lambda x: (x.exp().flip(1) @ frozen).tanh().exp(), torch.randn(2, TOKENS, WIDTH, requires_grad=True))
    _, found = phases(taped)
    assert [makers(taped, phase) for phase in found if not phase.is_divided] == [["tanh", "exp"]]
    assert len(found) == 2


def test_what_is_never_repeated_begins_no_phase() -> None:
    taped = record(lambda x: x.exp().cumsum(1).tanh().exp(), torch.randn(2, TOKENS, WIDTH, requires_grad=True))
    _, found = phases(taped)
    assert [phase.is_divided for phase in found] == [True]


def routed(*, behind: bool = False) -> nn.Module:
    return stack(make=lambda: GroupedExperts(behind=behind))


def plan_of(manager: memo.Manager, layer: int = 0) -> RangedPlan:
    assert manager._tokenwise is not None
    last = manager._tokenwise._plans.last(f"layers.{layer}")
    assert last is not None
    assert isinstance(last[2], RangedPlan)
    return last[2]


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize(
    "alpha",
    [0.2, 0.5, 0.8, (0.25, 0.5, 0.25), TokenLevels(attention=1.0, piece=0.4), TokenLevels.of_alpha(0.4)],
    ids=str,
)
def test_gradients_are_equal_while_routing_changes(
    offload: Callable[..., memo.Manager], alpha: Any, behind: bool
) -> None:
    model = routed(behind=behind)
    manager = offload(model, alpha=alpha, min_bytes=1)
    assert_equal(train(model, lambda step: model(ids(step)), manager), plain(lambda: routed(behind=behind)))
    told = manager.explain(0)
    assert told.tokens == SEQ
    assert told.ranges
    assert manager.report().tokenwise.deviation == 0.0  # type: ignore[union-attr]


def test_products_of_experts_are_replayed_for_all_rows_or_kept(offload: Callable[..., memo.Manager]) -> None:
    """Never for a part of them: a part of an expert's rows may round in another way, and which part differs by call."""
    fates = set()
    for alpha in (0.2, 0.5, 0.8):
        model = routed()
        manager = offload(model, alpha=alpha, min_bytes=1)
        train(model, lambda step: model(ids(step)), manager)  # noqa: B023
        told = manager.explain(0)
        up = next(row for row in told.rows if row.operator == "aten.addmm")
        assert up.fate is Fate.DIVIDED
        first, second = (row for row in told.rows if row.operator == "aten._grouped_mm")
        fates.add(first.fate)
        assert first.replayed_tokens == ((0, SEQ) if first.fate is Fate.REPLAYED else None)
        assert second.replayed_tokens in (None, (0, SEQ))
        manager.close()
    assert fates == {Fate.MOVED, Fate.REPLAYED}


def test_phases_run_one_after_another(offload: Callable[..., memo.Manager], monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay that ran within another one would hold the other's results, and its time would be counted twice."""
    depths, run = [0], RangedReplay._run

    def noted(self: Any, *args: Any) -> None:
        depths.append(depths.pop() + 1)
        deepest.append(depths[-1])
        run(self, *args)
        depths.append(depths.pop() - 1)

    deepest: list[int] = []
    monkeypatch.setattr(Replay, "_run", noted)
    model = routed(behind=True)
    manager = offload(model, alpha=0.3, min_bytes=1)
    train(model, lambda step: model(ids(step)), manager)
    assert len(plan_of(manager).replays) == 3
    assert set(deepest) == {1}


def test_choices_of_experts_are_kept(offload: Callable[..., memo.Manager]) -> None:
    """A replay takes the same path: indices, and the order of the rows, are never made again."""
    model = routed()
    manager = offload(model, alpha=0.4, min_bytes=1)
    train(model, lambda step: model(ids(step)), manager)
    steps, plan = plan_of(manager).rows.tape.steps, plan_of(manager)
    assert not {steps[number].name for number in plan.steps} & {"aten.topk", "aten.sort"}
    assert any(step.name == "aten.topk" for step in steps)


@pytest.mark.parametrize("behind", [False, True])
def test_bytes_follow_alpha_by_tokens_and_by_whole_storages(offload: Callable[..., memo.Manager], behind: bool) -> None:
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
    """What is replayed whole is not in proportion to the tokens, neither its bytes nor what its replay holds."""
    model = routed()
    manager = offload(model, alpha=0.5, min_bytes=1)
    train(model, lambda step: model(ids(step)), manager)
    tapes, told = manager._tokenwise, manager.explain(0)
    assert tapes is not None
    assert told.ranges
    costs = next(costs for costs in tapes.costs() if costs.layer == "layers.0")
    assert not costs.divisible
    assert {point.saved_bytes for point in costs.points} <= {point.kept_nbytes for point in told.points}


@pytest.mark.parametrize("policy", ["lazy", "eager", "random"])
@pytest.mark.parametrize("alpha", [0.25, 0.6, (0.25, 0.5, 0.25)], ids=str)
def test_phases_race_with_no_copy(policy: str, alpha: Any) -> None:
    model = routed(behind=True)
    made = checked(model, policy, tier="disk", alpha=alpha, seed=7)
    got = train(model, lambda step: model(ids(step)), made.manager)
    assert_equal(got, plain(lambda: routed(behind=True)))
    assert len(plan_of(made.manager, 1).replays) > 1
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
