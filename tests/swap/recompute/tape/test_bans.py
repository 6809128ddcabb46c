"""What is never repeated at each level, by what an operator is and what it costs, and by the user's own choice."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from small_models import Block
from taped import Taped, record
from torch import nn
from torch.nn import functional as F

from memo.swap import Bans, Level
from memo.swap.recompute.tape.bans import banned

if TYPE_CHECKING:
    from collections.abc import Callable


def hidden(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (2, 16, 32)), generator=torch.Generator().manual_seed(0)).requires_grad_()


def names(taped: Taped, level: Level, chosen: Bans | None = None) -> set[str]:
    return {taped.tape.steps[number].name for number in banned(taped.tape, level, chosen=chosen or Bans())}


def test_the_levels_of_a_block() -> None:
    taped = record(Block(32, 2), hidden())
    (attention,) = (step.name for step in taped.tape.steps if "attention" in step.name)
    assert names(taped, Level.SAVE_INPUT) == set()
    assert names(taped, Level.SAVE_ATTENTION) == {attention}
    assert names(taped, Level.SAVE_MATMULS) == {attention, "aten.addmm"}


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda x: x.cumsum(1), "aten.cumsum"),
        (lambda x: x.sort(-1).values, "aten.sort"),
        (lambda x: x.topk(3, -1).values, "aten.topk"),
        (lambda x: F.conv1d(x.transpose(1, 2), torch.ones(32, 1, 3), groups=32), "aten.convolution"),
    ],
)
def test_what_is_dear_is_kept_with_attention_and_repeated_from_the_input(
    function: Callable[[torch.Tensor], torch.Tensor], name: str
) -> None:
    taped = record(function, hidden())
    assert name in names(taped, Level.SAVE_ATTENTION)
    assert name not in names(taped, Level.SAVE_INPUT)


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda x: torch.zeros(4, 32).index_add(0, torch.zeros(2, dtype=torch.long), x[:, 0]), "aten.index_add"),
        (
            lambda x: torch.zeros(2, 16, 32).scatter_add(1, torch.zeros(2, 16, 32, dtype=torch.long), x),
            "aten.scatter_add",
        ),
    ],
)
def test_sums_in_no_fixed_order_are_repeated_by_deterministic_algorithms_alone(
    function: Callable[[torch.Tensor], torch.Tensor], name: str
) -> None:
    """A trial may pass by luck, or at a size at which they have an order."""
    taped = record(function, hidden())
    assert name in names(taped, Level.SAVE_ATTENTION)
    assert name in names(taped, Level.SAVE_INPUT)
    torch.use_deterministic_algorithms(True)
    try:
        assert name not in names(taped, Level.SAVE_INPUT)
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(
    ("level", "reason"),
    [
        (Level.SAVE_ATTENTION, "a convolution over several positions is kept"),
        (Level.SAVE_MATMULS, "convolutions are kept"),
    ],
)
def test_a_convolution_is_called_one(level: Level, reason: str) -> None:
    taped = record(lambda x: F.conv1d(x.transpose(1, 2), torch.ones(32, 1, 3), groups=32), hidden())
    assert banned(taped.tape, level)[taped.step("aten.convolution").number] == reason


def test_a_convolution_of_one_point_is_a_product() -> None:
    weight = nn.Parameter(torch.ones(8, 32, 1))
    taped = record(lambda x: F.conv1d(x.transpose(1, 2), weight), hidden())
    assert "aten.convolution" not in names(taped, Level.SAVE_ATTENTION)
    assert "aten.convolution" in names(taped, Level.SAVE_MATMULS)


def test_products_of_two_activations_go_by_what_they_weigh() -> None:
    """Scores are larger than both factors and repeated; what they are multiplied with is smaller, and kept."""

    def attends(x: torch.Tensor) -> torch.Tensor:
        return (x @ x.transpose(1, 2)).softmax(-1) @ x.sin()

    taped = record(attends, hidden(1, 64, 8))
    scores, values = (step.number for step in taped.tape.steps if step.name == "aten.bmm")
    found = banned(taped.tape, Level.SAVE_ATTENTION)
    assert scores not in found
    assert values in found
    assert {scores, values} <= set(banned(taped.tape, Level.SAVE_MATMULS))


def test_a_product_with_an_adapters_merged_weight_is_one_with_a_parameter() -> None:
    weight, up, down = (nn.Parameter(torch.randn(*shape)) for shape in ((32, 32), (32, 4), (4, 32)))
    taped = record(lambda x: x.flatten(0, 1).mm(weight + up @ down), hidden())
    assert not names(taped, Level.SAVE_ATTENTION)


def test_only_indices_of_booleans_have_sizes_that_depend_on_numbers() -> None:
    by_number = record(lambda x: x[torch.tensor([0, 1])].sin(), hidden())
    by_boolean = record(lambda x: x[torch.tensor([True, False])].sin(), hidden())
    assert "aten.index" not in names(by_number, Level.SAVE_INPUT)
    sized = {step.name for step in by_boolean.tape.steps} & {"aten.index", "aten.nonzero"}
    assert names(by_boolean, Level.SAVE_INPUT) >= sized > set()


@pytest.mark.parametrize("name", ["aten.gelu", "gelu"])
def test_the_user_keeps_by_name(name: str) -> None:
    taped = record(Block(32, 2), hidden())
    assert names(taped, Level.SAVE_INPUT, Bans(keep=frozenset({name}))) == {"aten.gelu"}


def test_the_user_keeps_and_repeats_groups() -> None:
    taped = record(Block(32, 2), hidden())
    assert names(taped, Level.SAVE_INPUT, Bans(keep=frozenset({"matmul"}))) == {"aten.addmm"}
    assert names(taped, Level.SAVE_MATMULS, Bans(repeat=frozenset({"matmul", "attention"}))) == set()


def test_nobody_repeats_what_is_always_banned() -> None:
    taped = record(lambda x: (x * torch.rand_like(x)).sin(), hidden())
    assert names(taped, Level.SAVE_INPUT, Bans(repeat=frozenset({"rand_like"}))) == {"aten.rand_like"}


def test_what_a_trial_found_is_banned_with_its_reason() -> None:
    taped = record(Block(32, 2), hidden())
    number = taped.step("aten.gelu").number
    assert banned(taped.tape, Level.SAVE_INPUT, also=[number]) == {number: "repeating it gave something else"}
