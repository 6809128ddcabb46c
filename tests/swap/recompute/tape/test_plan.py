"""A plan's generated Python gives every byte that autograd saved, whatever the layer did with its memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from live_bytes import LiveBytes
from small_models import Block
from taped import Taped, assert_replays, record
from torch import nn
from torch.nn import functional as F

from memo.swap import Level

if TYPE_CHECKING:
    from collections.abc import Callable

LEVELS = [Level.SAVE_INPUT, Level.SAVE_ATTENTION, Level.SAVE_MATMULS]


def hidden(seed: int = 0, *shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (2, 16, 32)), generator=torch.Generator().manual_seed(seed)).requires_grad_()


class Odd(torch.autograd.Function):
    """Saves parts and views of what it makes and of what it changes."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y[:, ::2].add_(1)
        z = y.transpose(0, 1)
        ctx.save_for_backward(y[:, 1:], z, y.view(torch.int32), torch.stack([y, y]).sum(0))
        return z.sin().transpose(0, 1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0] * ctx.saved_tensors[1].transpose(0, 1)


def fused_parts(x: torch.Tensor) -> torch.Tensor:
    q, k, v = torch.cat([x, x.sin(), x.cos()], -1).unsafe_chunk(3, -1)
    return (q.tanh() * k.exp()).sum() + v.sigmoid().sum()


def parts_changed(x: torch.Tensor) -> torch.Tensor:
    y = x.mul(3)
    y[:, :8] *= 2
    y[:, 8:].tanh_()
    return y.sin().sum() + y.cos().sum()


def given_out(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        out = torch.zeros_like(x)
        torch.addcmul(x, x, x, value=0.5, out=out)
        torch.cumsum(out, 1, out=out)
    return x * out.sin()


def one_of_many(x: torch.Tensor) -> torch.Tensor:
    values, numbers = x.topk(4, -1)
    first, *_ = x.split(4, -1)
    return (values * first).sin() + x.gather(-1, numbers).cos()


def in_place_over_saved(x: torch.Tensor) -> torch.Tensor:
    return F.relu(F.relu(x * 2, inplace=True).add_(1.0), inplace=True).exp_().log()


def broadcast(x: torch.Tensor) -> torch.Tensor:
    row = x.mean(1, keepdim=True).expand_as(x)
    return (row * x).sin() * row.contiguous().cos()


def constants(x: torch.Tensor) -> torch.Tensor:
    return (x * torch.tensor([0.5]) + torch.arange(32) + torch.full((1,), 2.0)).sin() * torch.tril(torch.ones(32, 32))[
        3
    ]


def routed(x: torch.Tensor) -> torch.Tensor:
    flat = x.flatten(0, 1)
    rows = (flat.sum(-1) > 0).nonzero().squeeze(-1)
    return torch.zeros_like(flat).index_add(0, rows, flat[rows].sin()).cos()


def masks(x: torch.Tensor) -> torch.Tensor:
    hidden = torch.ones(16, 16, dtype=torch.bool).triu(1)
    return (x @ x.transpose(1, 2)).masked_fill(hidden, -torch.inf).softmax(-1) @ torch.where(x > 0, x, x.exp())


FUNCTIONS: list[Callable[[torch.Tensor], Any]] = [
    Odd.apply, fused_parts, parts_changed, given_out, one_of_many, in_place_over_saved, broadcast, constants, routed, masks,
]  # fmt: skip


@pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.name)
@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: getattr(function, "__name__", "Odd"))
def test_every_byte_is_given_again(function: Callable[[torch.Tensor], Any], level: Level) -> None:
    assert_replays(record(function, hidden()), level)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.name)
def test_a_block_at_each_level(level: Level, dtype: torch.dtype) -> None:
    block = Block(32, 2).to(dtype)
    taped = record(block, hidden().detach().to(dtype).requires_grad_())
    plan = assert_replays(taped, level)
    names = {taped.tape.steps[number].name for number in plan.steps}
    assert ("aten.addmm" in names) == (level is not Level.SAVE_MATMULS)
    assert any("attention" in name for name in names) == (level is Level.SAVE_INPUT)


def test_whatever_is_banned_is_kept_and_the_rest_is_made_of_it() -> None:
    """Each step in turn."""
    taped = record(parts_changed, hidden())
    for step in taped.tape.steps:
        plan = assert_replays(taped, bans=[step.number])
        assert step.number not in plan.steps


def test_what_is_held_in_place_is_never_changed_by_a_replay() -> None:
    """A step that writes in place writes into a copy where its operand is kept; run twice, the replay gives the same."""
    taped = record(lambda x: x.mul(2).sin_().mul_(3).cos(), hidden())
    for step in taped.tape.steps:
        plan = taped.plan(bans=[step.number])
        first = taped.replay(plan)
        second = taped.replay(plan)
        assert all(torch.equal(first[storage], second[storage]) for storage in first)
        assert all(torch.equal(first[storage], taped.sources[storage]) for storage in first)


def test_a_replay_of_another_call_reads_that_calls_numbers() -> None:
    block = Block(32, 2)
    one, other = record(block, hidden(0)), record(block, hidden(1))
    given = other.replay(one.plan())
    assert given
    assert all(torch.equal(made, other.sources[storage]) for storage, made in given.items())


@pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.name)
@pytest.mark.parametrize(
    "function", [Block(32, 2), *FUNCTIONS], ids=lambda function: getattr(function, "__name__", "Block")
)
def test_what_a_replay_holds_at_once_is_what_the_plan_says(
    function: Callable[[torch.Tensor], Any], level: Level
) -> None:
    """To the byte: above all that it gives, and beside what is kept, as operators on the host count it."""
    taped = record(function, hidden())
    plan = taped.plan(level)
    given: dict[int, torch.Tensor] = {}
    with LiveBytes() as device, torch.no_grad():
        plan.replay(
            lambda position: taped.recorder.tensors[plan.kept[position].storage].detach(),
            taped.recorder.carried,
            given.__setitem__,
            torch.device("cpu"),
        )
    gives = sum(made.untyped_storage().nbytes() for made in given.values())
    assert device.peak == plan.held_bytes + gives
    given.clear()
    assert device.live == 0, "nothing else outlives it"


def test_masks_of_dropout_move_as_bits_and_their_values_are_made_again() -> None:
    class Drops(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.native_dropout(x.sin(), 0.3, True)[0].exp() + F.dropout(x.cos(), 0.2).exp()

    taped: Taped = record(Drops(), hidden())
    plan = assert_replays(taped)
    assert sorted(item.bits_of >= 0 for item in plan.kept) == [False, True, True]
    assert plan.kept_bits == 2 * 2 * 16 * 32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("p", [0.1, 0.5, 1.0])
def test_a_fused_dropout_is_applied_again_to_the_last_bit(p: float, dtype: torch.dtype) -> None:
    taped = record(
        lambda x: torch.native_dropout(x.sin(), p, True)[0].exp(), hidden().detach().to(dtype).requires_grad_()
    )
    plan = assert_replays(taped)
    assert plan.kept_bits == 2 * 16 * 32


def test_a_dropout_that_drops_nothing_is_a_view() -> None:
    assert_replays(record(lambda x: torch.native_dropout(x.sin(), 0.3, False)[0].exp(), hidden()))
