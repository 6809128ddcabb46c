"""The tape's steps and contents: writes in place make new contents, whole writes need none before, and what nothing seen has
written is never crossed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy
import pytest
import torch
from taped import assert_replays, content, record
from torch import nn
from torch.nn import functional as F

from memo.swap.recompute.tape.tape import Carried, ContentUse, Hidden, Tape, uses_in

if TYPE_CHECKING:
    from collections.abc import Callable


def hidden(seed: int = 0, *shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (2, 8, 4)), generator=torch.Generator().manual_seed(seed)).requires_grad_()


def versions(tape: Tape, storage: int) -> list[int]:
    return [one.version for one in tape.contents if one.storage == storage]


def test_views_make_nothing() -> None:
    taped = record(lambda x: x.transpose(0, 1).reshape(8, 8)[1:].unsqueeze(0).sin(), hidden())
    made = [step.name for step in taped.tape.steps if step.makes]
    assert made == ["aten.clone", "aten.sin"]


def test_a_write_in_place_makes_the_next_content_of_its_storage() -> None:
    taped = record(lambda x: x.mul(2).add_(1).sin_().cos(), hidden())
    product = taped.step("aten.mul").makes[0]
    add, sine = taped.step("aten.add_"), taped.step("aten.sin_")
    assert add.reads == (product,)
    assert sine.reads == add.makes
    assert versions(taped.tape, taped.tape.contents[product].storage) == [0, 1, 2]
    assert_replays(taped)


def test_a_write_to_a_part_needs_the_rest() -> None:
    def layer(x: torch.Tensor) -> torch.Tensor:
        y = x.mul(2)
        y[:, 1:].fill_(3.0)
        return y.cos()

    taped = record(layer, hidden())
    assert taped.step("aten.fill_").reads == taped.step("aten.mul").makes
    assert_replays(taped)


@pytest.mark.parametrize(
    "write",
    [
        lambda y, x: y.copy_(x),
        lambda y, x: y.zero_(),
        lambda y, x: y.fill_(1.5),
        lambda y, x: torch.add(x.detach(), 1, out=y),
        lambda y, x: y.transpose(0, 1).copy_(x.transpose(0, 1)),
    ],
)
def test_a_write_to_all_of_it_needs_nothing_of_before(write: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
    def layer(x: torch.Tensor) -> torch.Tensor:
        y = x.detach().mul(2)
        with torch.no_grad():
            write(y, x)
        return x * y.sin()

    taped = record(layer, hidden())
    before = taped.step("aten.mul").makes[0]
    (writer,) = (step for step in taped.tape.steps if before not in step.makes and any(
        taped.tape.contents[made].storage == taped.tape.contents[before].storage for made in step.makes))  # fmt: skip
    assert before not in writer.reads
    plan = assert_replays(taped)
    assert taped.step("aten.mul").number not in plan.steps


def test_a_write_of_as_many_elements_that_overlap_needs_the_rest() -> None:
    def layer(x: torch.Tensor) -> torch.Tensor:
        y = x.detach().mul(2)
        y.as_strided((y.numel() // 2, 2), (1, 1)).fill_(0.5)
        return x * y.sin()

    taped = record(layer, hidden())
    assert taped.step("aten.fill_").reads == taped.step("aten.mul").makes
    assert_replays(taped)


def test_memory_filled_in_pieces_is_as_good_as_any() -> None:
    def layer(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x).detach()
        out[..., :2], out[..., 2:] = -x.detach()[..., 2:], x.detach()[..., :2]
        return x * out.sin()

    taped = record(layer, hidden())
    assert taped.step("aten.empty_like").opaque is None
    assert_replays(taped)


@pytest.mark.parametrize("make", [torch.empty_like, lambda x: torch.empty(x.shape), lambda x: x.new_empty(x.shape)])
def test_memory_that_nothing_seen_fills_is_never_made_again(make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def layer(x: torch.Tensor) -> torch.Tensor:
        out = make(x.detach())
        numpy.copyto(out.numpy(), x.detach().numpy() * 3)
        return x * out.mul(2)  # which autograd saves, and not what it is made of

    taped = record(layer, hidden())
    (allocation,) = (step for step in taped.tape.steps if step.opaque == "it allocates memory that nothing seen fills")
    plan = assert_replays(taped)
    assert allocation.number not in plan.steps


def test_half_of_it_filled_is_not_enough() -> None:
    def layer(x: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(x).detach()
        out[..., :2] = x.detach()[..., :2]
        numpy.copyto(out[..., 2:].numpy(), x.detach().numpy()[..., 2:])
        return x * out

    assert record(layer, hidden()).step("aten.empty_like").opaque is not None


def test_memory_of_which_nothing_is_read_may_stay_empty() -> None:
    taped = record(lambda x: x + torch.zeros_like(torch.empty_like(x)), hidden())
    assert taped.step("aten.empty_like").opaque is None


@pytest.mark.parametrize(
    ("draw", "name"),
    [
        (lambda x: x * torch.rand_like(x), "aten.rand_like"),
        (lambda x: x * torch.empty_like(x).normal_(), "aten.normal_"),
        (lambda x: x * torch.randint(5, x.shape), "aten.randint"),
        (lambda x: x[torch.randperm(2)], "aten.randperm"),
    ],
)
def test_random_numbers_are_never_drawn_again(draw: Callable[[torch.Tensor], torch.Tensor], name: str) -> None:
    taped = record(lambda x: draw(x.sin()).cos(), hidden())
    assert taped.step(name).opaque == "it draws random numbers"
    state = torch.get_rng_state()
    assert_replays(taped)
    assert torch.equal(torch.get_rng_state(), state)


def test_attention_draws_only_with_dropout() -> None:
    def attend(dropout: float) -> Any:
        taped = record(lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=dropout), hidden(0, 1, 2, 16, 8))
        return next(step for step in taped.tape.steps if "attention" in step.name or "softmax" in step.name)

    assert attend(0.0).opaque is None


def test_the_layers_input_and_parameters_are_not_the_layers_to_write() -> None:
    weight = nn.Parameter(torch.ones(4))

    def layer(x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            weight.add_(1.0)
            x.mul_(1.5)
        return (x * weight).sin()

    taped = record(layer, hidden())
    assert taped.step("aten.add_").opaque is not None
    assert taped.step("aten.mul_").opaque is not None
    assert taped.step("aten.mul").opaque is not None, "it reads both"


def test_operators_with_a_state_or_outside_torch_are_not_repeated() -> None:
    norm = nn.BatchNorm1d(8)
    taped = record(lambda x: norm(x.sin()).cos(), hidden())
    (step,) = (step for step in taped.tape.steps if "batch_norm" in step.name)
    assert step.opaque == "it has a state of its own"


def test_memory_whose_size_changes_is_opaque() -> None:
    def layer(x: torch.Tensor) -> torch.Tensor:
        y = torch.zeros(2).resize_(2, 8, 4)
        return (x + y.fill_(1.0)).sin()

    taped = record(layer, hidden())
    assert taped.step("aten.resize_").opaque == "it changes the size of memory"


def test_words_become_arguments_as_they_were() -> None:
    taped = record(lambda x: F.pad(x.sum([1], keepdim=True), [1, 1], value=0.25).clamp(min=0.5), hidden())
    summed, padded = taped.step("aten.sum"), taped.step("aten.constant_pad_nd")
    assert summed.args[1:] == ([1], True)
    assert isinstance(summed.args[0], ContentUse)
    assert padded.args[1] == [1, 1]
    assert padded.args[2] == Carried(0)
    assert taped.recorder.carried == [0.25, 0.5]
    assert uses_in(padded.out)[0].content == padded.makes[0]


def test_a_hidden_tensor_stops_its_operators() -> None:
    taped = record(lambda x: x * torch.eye(4).to_sparse().to_dense().sum(), hidden())
    hidden_ones = [step for step in taped.tape.steps if any(isinstance(arg, Hidden) for arg in step.args)]
    assert all(step.opaque is not None for step in hidden_ones if step.makes)
    assert_replays(taped)


def test_the_last_content_of_each_storage_is_what_is_there_at_the_end() -> None:
    taped = record(lambda x: x.mul(2).sin_().add_(1).cos(), hidden())
    for storage, number in enumerate(taped.tape.last):
        assert taped.tape.contents[number].storage == storage
        assert taped.tape.contents[number].version == max(versions(taped.tape, storage))


def test_a_tape_holds_no_tensor() -> None:
    taped = record(lambda x: x.mul(2).sin_().cos(), hidden())
    for step in taped.tape.steps:
        assert not any(isinstance(arg, torch.Tensor) for arg in (*step.args, *step.kwargs.values(), step.out))
    assert content(taped.out).numel() == 2 * 8 * 4 * 4
