"""Facts that a rank takes from a schedule's order before the first step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn
from torch.distributed.pipelining.schedules import _Action

from memo.parallel import PipelineOrder, group_of
from memo.parallel.tensor_parallel_group import note_group


def schedule(rank: int, order: str, stages: dict[int, nn.Module]) -> Any:
    """As torch's, with what is read of it: `0F0 0B0` is stage, action, microbatch."""
    made = [
        SimpleNamespace(stage_index=index, submod=module, group_rank=rank, num_stages=4)
        for index, module in stages.items()
    ]
    actions = [None if word == "-" else _Action.from_str(word) for word in order.split()]
    held = {"_stages": made} if len(made) > 1 else {"_stage": made[0]}
    return SimpleNamespace(pipeline_order={rank: actions}, **held)


def stage(layers: int) -> nn.ModuleList:
    return nn.ModuleList(nn.Linear(1, 1) for _ in range(layers))


def test_one_stage_comes_to_its_layers_in_reverse_microbatch_by_microbatch() -> None:
    module = stage(2)
    found = PipelineOrder.of(schedule(0, "0F0 0F1 - 0B0 0F2 0B1 0B2", {0: module}), list(module))
    assert found is not None
    assert (found.stages, found.own) == (4, (0,))
    assert (found.held, found.weight) == (2, 4)
    assert found.backward == ((1, 0), (0, 0), (1, 1), (0, 1), (1, 2), (0, 2))


def test_the_last_stage_of_torchs_1f1b_counts_its_forwards_from_one_and_is_understood() -> None:
    module = stage(1)
    found = PipelineOrder.of(schedule(1, "- 1F1 1B0 1F2 1B1", {1: module}), list(module))
    assert found is not None
    assert found.held == 1
    assert found.backward == ((0, 0), (0, 1))


def test_a_split_backward_comes_twice_the_second_time_from_the_first_layer_on() -> None:
    first, last = stage(1), stage(2)
    order = "0F0 3F0 3I0 0F1 3W0 0I0 0W0 3F1 3I1 3W1 0I1 0W1"
    found = PipelineOrder.of(schedule(0, order, {0: first, 3: last}), [*first, *last])
    assert found is not None
    assert found.held == 2
    assert found.weight == 2 * 1 + 1 * 2
    # The first stage's backward is whole: its input wants no gradient. At a turn the same call is not come to anew.
    assert found.backward == ((2, 0), (1, 0), (2, 0), (0, 0), (2, 1), (1, 1), (2, 1), (0, 1))
    assert found.turns is not None
    assert found.turns.layers == (1, 2)
    said = " ".join(f"{turn.chunk}{turn.kind}{turn.microbatch}" for turn in found.turns.turns)
    assert said == "0F0 1F0 1I0 0F1 1W0 0B0 1F1 1I1 1W1 0B1"


@pytest.mark.parametrize("order", [None, {}])
def test_a_schedule_that_shows_no_order_says_nothing(order: Any) -> None:
    module = stage(1)
    silent = SimpleNamespace(pipeline_order=order, _stage=SimpleNamespace(stage_index=0, submod=module, group_rank=0))
    assert PipelineOrder.of(silent, list(module)) is None


def test_a_model_that_was_divided_knows_its_group_inside_another_too() -> None:
    model, group = stage(2), SimpleNamespace()
    assert group_of(model) is None
    note_group(model, group)  # type: ignore[arg-type]
    assert group_of(nn.Sequential(model)) is group
    assert group_of(stage(1)) is None
