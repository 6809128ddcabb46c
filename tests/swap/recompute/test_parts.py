"""A recompute in parts gives the same bytes, each part when backward asks for it, and less is there at backward's peak."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from offload_models import assert_split, causal, compare, gpt, hugging_face, ours
from small_models import Block
from taped import record
from torch import nn

import memo
from memo.gpt import preset
from memo.gpt.model import GPT
from memo.swap import Level
from memo.swap.recompute.parts import held_and_absent, parts_of

if TYPE_CHECKING:
    from pathlib import Path

LEVELS = [Level.SAVE_INPUT, Level.SAVE_ATTENTION, Level.SAVE_MATMULS]


@pytest.fixture(autouse=True)
def parts_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that small layers have parts; of large ones one gives at least 64 MiB."""
    monkeypatch.setattr("memo.swap.levels.PART_BYTES", 1)


def _hidden() -> torch.Tensor:
    return torch.randn(2, 16, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()


@pytest.mark.parametrize("level", LEVELS, ids=str)
def test_parts_give_what_the_whole_gives_in_any_order(level: Level) -> None:
    taped = record(Block(32, 2), _hidden())
    plan = taped.plan(level)
    parts = parts_of(plan)
    assert sorted(step for part in parts for step in part.steps) == sorted(plan.steps)
    assert sorted(storage for part in parts for storage in part.wanted) == sorted(plan.wanted)
    assert {item for part in parts for item in part.kept} == set(plan.kept)
    assert (len(parts) > 1) == (level is not Level.SAVE_INPUT)
    for part in reversed(parts):
        for storage, made in taped.replay(part).items():
            assert torch.equal(made, taped.sources[storage])


def test_steps_with_collectives_stay_in_one_part() -> None:
    plan = record(Block(32, 2), _hidden()).plan(Level.SAVE_ATTENTION)
    first, last = parts_of(plan)[0].steps[0], parts_of(plan)[-1].steps[-1]
    together = parts_of(plan, frozenset({first, last}))
    assert [{first, last} <= set(part.steps) for part in together].count(True) == 1
    assert len(together) < len(parts_of(plan))


def test_a_part_is_absent_while_another_one_is_used() -> None:
    plan = record(Block(32, 2), _hidden()).plan(Level.SAVE_ATTENTION)
    given = [part.given_nbytes for part in parts_of(plan)]
    held, absent = held_and_absent(plan)
    assert absent == sum(given) - max(given) > 0
    assert 0 <= held <= max(part.held_bytes for part in parts_of(plan))


def test_small_recomputes_have_one_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memo.swap.levels.PART_BYTES", 64 << 20)
    plan = record(Block(32, 2), _hidden()).plan(Level.SAVE_ATTENTION)
    assert parts_of(plan) == (plan,)
    assert held_and_absent(plan) == (plan.held_bytes, 0)


@pytest.mark.parametrize("alpha", [0.0, 0.4, Level.SAVE_MATMULS, Level.SAVE_INPUT], ids=str)
@pytest.mark.parametrize("name", ["gpt", "llama", "hf llama", "gpt2, dropout", "mixtral"])
def test_gradients_are_equal(name: str, alpha: Any, tmp_path: Path) -> None:
    is_ours = name in ("gpt", "llama")
    make = (lambda: gpt(name, dropout=0.1)) if is_ours else (lambda: hugging_face(name.removeprefix("hf ")))
    manager = compare(make, ours(2) if is_ours else causal(2), tmp_path, alpha, min_bytes=64)
    assert_split(manager, alpha)


def test_a_backward_never_holds_all_that_its_layer_saved(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def peak(part_bytes: int) -> int:
        monkeypatch.setattr("memo.swap.levels.PART_BYTES", part_bytes)
        model = GPT(preset("tiny", max_seq=512))
        manager = memo.offload(model, alpha=0, disk=tmp_path, min_bytes=64)
        ids = torch.randint(0, preset("tiny").vocab_size, (1, 513), generator=torch.Generator().manual_seed(1))

        def at_its_end(_module: Any, _inputs: Any, output: torch.Tensor) -> None:
            # Backward comes to the first layer: the last one is not moved, and holds all anyway.
            output.register_hook(lambda _: manager.stats.restart_peak() and None)

        model.layers[0].register_forward_hook(at_its_end)
        with manager:
            loss = model(ids[:, :-1], ids[:, 1:])
        loss.backward()
        in_backward = manager.stats.recent_peak_bytes
        manager.close()
        return in_backward

    whole, in_parts = peak(1 << 40), peak(1)
    hidden = 512 * preset("tiny").hidden * 4
    # Of a GPT's layer that saves 13 such tensors queries, keys, values and the first norm's result are made again later.
    assert in_parts <= whole - 3 * hidden


class _WritesIntoSaved(torch.autograd.Function):
    """Gives its gradient in the memory of what it saved, as fused kernels do; nothing counts the write."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, gate)
        return x * gate

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x, gate = ctx.saved_tensors
        of_gate = x * grads[0]
        x.data.mul_(0).add_(gate * grads[0])
        return x.data, of_gate


class _Reuses(nn.Module):
    """Its last operator's backward overwrites the layer's input, which queries are made again from."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.o = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)
        self.q.requires_grad_(False)
        self.k.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = torch.cumsum(self.q(x) * self.k(x), 1)
        result: torch.Tensor = _WritesIntoSaved.apply(x, nn.functional.gelu(self.o(mixed)))
        return result


def test_a_part_runs_before_backward_may_write_into_what_it_reads(tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(32, 32)
            self.layers = nn.ModuleList([_Reuses() for _ in range(3)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for layer in self.layers:
                x = layer(x)
            return x.square().sum()

    compare(Model, lambda model, step: model(_hidden() + step), tmp_path, 0.0, min_bytes=64)


class _Both(nn.Module):
    """Two branches whose results one operator multiplies: backward uses what both parts give by turns."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.one, self.other, self.out = (nn.LayerNorm(32), *(nn.Linear(32, 32) for _ in range(3)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = nn.functional.scaled_dot_product_attention(*(self.norm(x).unflatten(-1, (2, 16)).transpose(1, 2),) * 3)
        return x + self.out(mixed.transpose(1, 2).flatten(2)) * nn.functional.gelu(
            self.other(nn.functional.gelu(self.one(x)))
        )


def test_nothing_is_absent_where_backward_uses_two_parts_by_turns() -> None:
    plan = record(_Both(), _hidden()).plan(Level.SAVE_ATTENTION)
    assert len(parts_of(plan)) > 1
    assert held_and_absent(plan) == (plan.held_bytes, 0)
