"""Layers of which only the input is kept, chosen or for lack of room: attention runs again too, with the numbers that the
forward drew."""

from __future__ import annotations

import gc
import random
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from offload_models import causal, compare, gpt, hugging_face, ours, refused
from small_models import Block, assert_equal, checked, ids, stack, train
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import memo
from memo.errors import HostBudgetExceeded, UsageError
from memo.swap import Level, WhenFull

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def offload(model: nn.Module, tmp_path: Path, **options: Any) -> memo.Manager:
    return memo.offload(model, **{"disk": tmp_path, "min_bytes": 512, "alpha": 0.25, **options})


def repeated(manager: memo.Manager) -> dict[str, str]:
    use = manager.report().recompute
    assert use is not None
    return use.repeated


def seeded(model: nn.Module) -> Callable[[int], torch.Tensor]:
    def forward(step: int) -> torch.Tensor:
        torch.manual_seed(step)
        random.seed(step)
        loss: torch.Tensor = model(ids(step))
        return loss

    return forward


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["llama, eager", "gpt2, dropout", "mixtral", "mamba", "t5"])
def test_hugging_face_layers_whose_attention_or_routing_is_written_out(
    name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    manager = compare(lambda: hugging_face(name), causal(2), tmp_path, Level.SAVE_INPUT, dtype)
    assert refused(manager) == {}
    assert manager.stats.bytes_recomputed > 0


@pytest.mark.parametrize("name", ["gpt", "llama", "gpt2", "qwen3"])
def test_layers_chosen_to_run_again_whole(name: str, tmp_path: Path) -> None:
    """With dropout where there is any: the random numbers are those of the forward."""
    is_ours = name == "gpt"
    manager = compare(
        lambda: gpt("gpt", dropout=0.1) if is_ours else hugging_face(name),
        ours(2) if is_ours else causal(2),
        tmp_path,
        Level.SAVE_INPUT,
    )
    assert refused(manager) == {}
    assert set(repeated(manager).values()) == {"as chosen"}
    assert manager.stats.bytes_recomputed > 0


def test_autocast(tmp_path: Path) -> None:
    def forward(model: nn.Module, step: int) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss: torch.Tensor = ours(2)(model, step)
        return loss

    manager = compare(lambda: gpt("llama"), forward, tmp_path, Level.SAVE_INPUT)
    assert refused(manager) == {}
    assert manager.stats.bytes_recomputed > 0


def test_only_the_input_moves_and_all_products_but_the_last_run_again(tmp_path: Path) -> None:
    def flops(model: nn.Module, manager: memo.Manager | None) -> int:
        with FlopCounterMode(display=False) as counter:
            if manager is None:
                loss = ours(2)(model, 0)
            else:
                with manager:
                    loss = ours(2)(model, 0)
            loss.backward()
        return counter.get_total_flops()

    checkpointed = gpt("gpt")
    for layer in checkpointed.layers[:-1]:
        forward = layer.forward
        layer.forward = lambda *a, _forward=forward: checkpoint(_forward, *a, use_reentrant=False)
    model = gpt("gpt")
    manager = memo.offload(model, alpha=Level.SAVE_INPUT, disk=tmp_path, min_bytes=1)
    for _ in range(2):  # in which the recompute is tried
        flops(model, manager)
    before = manager.stats.bytes_disk
    assert flops(model, manager) == flops(checkpointed, None)
    assert manager.stats.bytes_disk - before == 3 * 2 * 63 * 128 * 4
    manager.close()


@pytest.mark.parametrize("policy", ["lazy", "eager", "random"])
def test_nothing_races(policy: str) -> None:
    model, reference = stack(layers=4), stack(layers=4)
    made = checked(model, policy, alpha=Level.SAVE_INPUT, seed=3)
    assert_equal(train(model, seeded(model), made.manager), train(reference, seeded(reference)))
    assert made.manager.stats.bytes_recomputed > 0
    made.manager.close()
    assert made.backend.races == []
    assert all(tier.used == 0 for tier in made.engine.tiers)


def test_a_graph_backwarded_twice_runs_its_layers_again_once(tmp_path: Path) -> None:
    model, reference = stack(), stack()
    manager = offload(model, tmp_path, alpha=Level.SAVE_INPUT)
    with manager:
        loss = model(ids())
    loss.backward(retain_graph=True)
    recomputed = manager.stats.bytes_recomputed
    assert recomputed > 0
    loss.backward()
    assert manager.stats.bytes_recomputed == recomputed
    want = reference(ids())
    want.backward(retain_graph=True)
    want.backward()
    for got, expected in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(got.grad, expected.grad)  # type: ignore[arg-type]
    manager.close()


LAYER = 16 * 2 * 48 * 32 * 4  # what one small block saves of two sequences, nearly


@pytest.mark.parametrize("alpha", [1.0, 0.75, (0.5, 0.5, 0.0)], ids=str)
def test_layers_that_no_tier_has_room_for_run_again_whole(alpha: Any) -> None:
    """Two and a half layers have room; of six, the later ones give up all but their inputs, and budgets stay hard."""
    model, reference = stack(layers=6), stack(layers=6)
    budget = int(2.5 * LAYER)
    made = checked(model, "random", budget=budget, alpha=alpha, when_full=WhenFull.RECOMPUTE)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*no tier has room", category=RuntimeWarning)
        got = train(model, seeded(model), made.manager)
    assert_equal(got, train(reference, seeded(reference)))
    assert set(repeated(made.manager).values()) == {"no tier has room for it"}
    assert made.engine.tiers[0].peak <= budget
    made.manager.close()
    assert made.backend.races == []


@pytest.mark.parametrize("alpha", [1.0, 0.5, (0.25, 0.5, 0.25)])
def test_with_room_for_inputs_alone_nothing_else_moves(alpha: Any) -> None:
    """Not what a division would have kept for its own recompute either: results of products, masks."""
    model, reference = stack(layers=6), stack(layers=6)
    entry = 2 * 48 * 32 * 4
    made = checked(model, budget=6 * entry, alpha=alpha, when_full=WhenFull.RECOMPUTE)
    with pytest.warns(RuntimeWarning, match="is recomputed whole in backward, attention too: no tier has room"):
        got = train(model, seeded(model), made.manager)
    assert_equal(got, train(reference, seeded(reference)))
    assert made.manager.stats.bytes_host == 3 * 5 * entry  # the last layer's stay: its backward comes next
    made.manager.close()


@memo.memoize
def as_routed(x: torch.Tensor) -> torch.Tensor:
    """Stands for rows that ranks have exchanged, which are kept at every level."""
    return 2 * x


class Routed(Block):
    """Of which four units more than the input are kept."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(as_routed(self.up(self.norm2(super().forward(x))))))


@pytest.mark.parametrize("alpha", [1.0, 0.5])
def test_layers_leave_room_for_what_later_ones_keep_when_repeated_whole(alpha: float) -> None:
    """Not for inputs alone: then the first layer would move whole, and the last ones find no room."""
    model, reference = (stack(layers=6, make=lambda: Routed(32, 2)) for _ in range(2))
    entry = 2 * 48 * 32 * 4
    budget = 7 * (1 + 4) * entry  # one whole layer and all later inputs
    made = checked(model, budget=budget, alpha=alpha, when_full=WhenFull.RECOMPUTE)
    with pytest.warns(RuntimeWarning, match="is recomputed whole in backward, attention too: no tier has room"):
        got = train(model, seeded(model), made.manager)
    assert_equal(got, train(reference, seeded(reference)))
    assert made.manager.stats.bytes_host == 3 * 5 * (1 + 4) * entry
    assert made.engine.tiers[0].peak <= budget
    made.manager.close()


def test_without_that_it_is_a_clear_error() -> None:
    model = stack(layers=6)
    made = checked(model, budget=int(2.5 * LAYER), alpha=1.0)
    with pytest.raises(HostBudgetExceeded, match="no room"), made.manager:
        model(ids())


def test_no_room_even_for_inputs_is_a_clear_error(tmp_path: Path) -> None:
    model = stack(layers=6)
    manager = memo.offload(model, alpha=1.0, host="16KiB", disk=[], on_full="recompute", min_bytes=512)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        with pytest.raises(HostBudgetExceeded, match="no room"), manager:
            model(ids())
    gc.collect()
    assert manager.stats.live_entries == 0
    manager.close()


def test_words_that_mean_nothing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="is none of"):
        memo.offload(stack(), disk=tmp_path, on_full="explode")  # type: ignore[arg-type]
