"""Levels and mixes of them: gradients equal bit for bit, no matrix product computed twice at the middle one, and bytes by
arithmetic."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
import torch
from offload_models import SEQ, assert_split, causal, compare, gpt, hugging_face, ours, refused, token_ids
from small_models import assert_equal, ids, stack, train
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import memo
from memo.errors import SwapError, UsageError
from memo.swap import Level
from memo.swap.recompute.tape.replay import Replay

if TYPE_CHECKING:
    from pathlib import Path

MIXES = [(0, 1, 0), (0.25, 0.5, 0.25), (0, 0.5, 0.5)]
GPTS = {"gpt": "gpt", "our llama": "llama"}
KINDS = [
    (torch.float32, 2),
    (torch.bfloat16, 1),
    pytest.param(torch.float32, 1, marks=pytest.mark.slow),
    pytest.param(torch.bfloat16, 2, marks=pytest.mark.slow),
]
"""Dtype and batch: in a long matrix each of them once, else all."""


def make(name: str, **shape: Any) -> nn.Module:
    return gpt(GPTS[name], **shape) if name in GPTS else hugging_face(name)


@pytest.mark.covering(2)
@pytest.mark.parametrize(("dtype", "batch"), KINDS)
@pytest.mark.parametrize("mix", MIXES, ids=str)
@pytest.mark.parametrize("name", ["gpt", "our llama", "gpt2", "llama", "qwen3"])
def test_any_mix_is_equal(name: str, mix: tuple[float, ...], dtype: torch.dtype, batch: int, tmp_path: Path) -> None:
    forward = ours(batch) if name in GPTS else causal(batch)
    assert_split(compare(lambda: make(name), forward, tmp_path, mix, dtype), mix)


@pytest.mark.parametrize("name", ["mistral", "phi3", "gemma", "neox", "opt, dropout", "bert"])
def test_more_models(name: str, tmp_path: Path) -> None:
    assert_split(compare(lambda: make(name), causal(2), tmp_path, (0.25, 0.5, 0.25)), 0.25)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout(dtype: torch.dtype, tmp_path: Path) -> None:
    assert_split(compare(lambda: make("gpt", dropout=0.1), ours(2), tmp_path, (0.25, 0.5, 0.25), dtype), 0.25)


@pytest.mark.parametrize("name", GPTS)
def test_autocast(name: str, tmp_path: Path) -> None:
    def forward(model: nn.Module, step: int) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss: torch.Tensor = ours(2)(model, step)
        return loss

    assert_split(compare(lambda: make(name), forward, tmp_path, (0.25, 0.5, 0.25)), 0.25)


@pytest.mark.parametrize("name", GPTS)
def test_autocast_that_has_cast_the_weights_already(name: str, tmp_path: Path) -> None:
    """The second forward within one region finds them cast, and its recompute casts them again."""

    def forward(model: nn.Module, step: int) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss: torch.Tensor = ours(1)(model, step) + ours(1)(model, step + 1)
        return loss

    assert_split(compare(lambda: make(name), forward, tmp_path, (0.25, 0.5, 0.25)), 0.25)


def test_layers_with_levels_of_their_own_and_a_change_between_steps(tmp_path: Path) -> None:
    first = {0: 0.5, "layers.1": (0, 1, 0), 2: Level.SAVE_INPUT}
    then = {3: 0.25, 2: Level.SAVE_MATMULS, 0: Level.SAVE_ALL}
    model, reference = gpt("gpt", layers=4), gpt("gpt", layers=4)
    reference.load_state_dict(model.state_dict())
    manager = memo.offload(model, alpha=1.0, levels=first, disk=tmp_path, min_bytes=1024)
    before = train(model, lambda step: ours(2)(model, step), manager, steps=2)
    assert refused(manager) == {}
    assert "layers.2: as chosen" in str(manager.report())
    manager.choose_levels(then)
    after = train(model, lambda step: ours(2)(model, step + 2), manager, steps=2)
    assert_equal(before, train(reference, lambda step: ours(2)(reference, step), steps=2))
    assert_equal(after, train(reference, lambda step: ours(2)(reference, step + 2), steps=2))
    assert refused(manager) == {}
    manager.close()


def test_a_layer_whose_result_of_a_product_is_changed_in_place(tmp_path: Path) -> None:
    """The product as it was is what the middle level needs, whatever became of its memory; and only its own tokens."""

    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(F.relu(self.up(self.norm(x)).mul_(1.5).sin_(), inplace=True)).tanh()

    for batch in (1, 2):
        model, reference = stack(make=InPlace), stack(make=InPlace)
        manager = memo.offload(model, alpha=(0.25, 0.5, 0.25), disk=tmp_path, min_bytes=512)
        got = train(model, lambda step: model(ids(step, batch)), manager)  # noqa: B023
        assert_equal(got, train(reference, lambda step: reference(ids(step, batch))))  # noqa: B023
        assert refused(manager) == {}
        assert manager.stats.bytes_recomputed > 0
        manager.close()


def test_a_second_backward_and_a_second_order(tmp_path: Path) -> None:
    model, reference = gpt("gpt"), gpt("gpt")
    reference.load_state_dict(model.state_dict())
    manager = memo.offload(model, alpha=(0.25, 0.5, 0.25), disk=tmp_path, min_bytes=1024)
    with manager:
        loss = ours(2)(model, 0)
    want = ours(2)(reference, 0)
    for _ in range(2):
        loss.backward(retain_graph=True)
        want.backward(retain_graph=True)
    for ours_, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours_.grad, theirs.grad)  # type: ignore[arg-type]
    manager.close()


def test_a_recompute_that_failed_halfway_is_made_up_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, reference = gpt("gpt"), gpt("gpt")
    reference.load_state_dict(model.state_dict())
    manager = memo.offload(model, alpha=(0.25, 0.5, 0.25), disk=tmp_path, min_bytes=1024)
    with manager:
        loss = ours(2)(model, 0)
    bring = Replay._bring

    def broken(self: Replay, position: int) -> torch.Tensor:
        if position == len(self._kept) - 1:  # others are in place already
            raise SwapError("a read failed")
        return bring(self, position)

    with monkeypatch.context() as patched:
        patched.setattr(Replay, "_bring", broken)
        with pytest.raises(SwapError, match="a read failed"):
            loss.backward(retain_graph=True)
    model.zero_grad()
    loss.backward()
    ours(2)(reference, 0).backward()
    for ours_, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours_.grad, theirs.grad)  # type: ignore[arg-type]
    manager.close()


def flops(model: nn.Module, forward: Any, manager: memo.Manager | None) -> int:
    """Of matrix products alone: the counter knows no formula for the CPU's attention."""
    with FlopCounterMode(display=False) as counter:
        if manager is None:
            loss = forward(model, 0)
        else:
            with manager:
                loss = forward(model, 0)
        loss.backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("name", ["gpt", "our llama", "gpt2", "llama", "qwen3"])
def test_the_middle_level_computes_no_matrix_product_twice(name: str, tmp_path: Path) -> None:
    def forward(model: nn.Module, step: int) -> torch.Tensor:
        return model(tokens, tokens) if name in GPTS else causal(2)(model, step)  # type: ignore[no-any-return]

    tokens = token_ids(0, 2)
    plain = flops(make(name), forward, None)
    counted = {}
    for mix in [(0, 1, 0), (0.25, 0.75, 0), (0, 0, 1), (0, 0.5, 0.5)]:
        model = make(name)
        manager = memo.offload(model, alpha=mix, disk=tmp_path, min_bytes=1)
        flops(model, forward, manager)  # the first step tries the recompute out
        counted[mix] = flops(model, forward, manager) - plain
        assert manager.stats.bytes_recomputed > 0
        manager.close()
    assert counted[0, 1, 0] == 0
    assert counted[0, 0, 1] > 0
    assert max(counted[0.25, 0.75, 0], counted[0, 0.5, 0.5]) <= counted[0, 0, 1]


def moved(model: nn.Module, forward: Any, mix: Any, tmp_path: Path) -> memo.Manager:
    """One forward, and all layers but the last one moved."""
    manager = memo.offload(model, alpha=mix, disk=tmp_path, min_bytes=1)
    with manager:
        forward(model, 0)
    return manager


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mix", MIXES, ids=str)
def test_gpt_bytes(mix: tuple[float, float, float], dtype: torch.dtype, tmp_path: Path) -> None:
    """Of sixteen units of b·s·h the middle level moves ten: input, attention, q, k, v, the projection after attention
    (which autograd does not save) and four of the MLP. The norms' statistics are computed again."""
    model = gpt("gpt").to(dtype)
    manager = moved(model, lambda model, step: model(token_ids(0, 2), token_ids(0, 2)), mix, tmp_path)
    tokens = 2 * SEQ
    unit = tokens * model.config.hidden * dtype.itemsize
    statistics = 4 * tokens * (4 if dtype is torch.float32 else dtype.itemsize)
    log_sum_exp = tokens * model.config.heads * 4
    layer = 2 * unit + log_sum_exp + mix[0] * (14 * unit + statistics) + mix[1] * 8 * unit
    moved_bytes = manager.stats.bytes_disk / (model.config.layers - 1)
    assert moved_bytes == layer if 1 in mix else 2 * unit < moved_bytes <= layer
    manager.close()


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 0.53), (torch.bfloat16, 0.49)])
def test_llama_bytes(dtype: torch.dtype, most: float, tmp_path: Path) -> None:
    """In units of b·s·h: four heads, two of keys and values, 80 = 2.5 units between the MLP's products."""
    total = moved(make("llama").to(dtype), causal(2), 1.0, tmp_path)
    middle = moved(model := make("llama").to(dtype), causal(2), (0, 1, 0), tmp_path)
    first = middle.stats.bytes_disk
    with middle:  # the projection after attention is held from the second call on
        causal(2)(model, 1)
    kv, mlp = 0.5, 80 / 32
    unit = 2 * SEQ * 32 * dtype.itemsize
    log_sum_exp = 2 * SEQ * 4 * 4
    # Input and attention; projections q, k, v and the one after attention; gate and up.
    second = middle.stats.bytes_disk - first
    assert second == 2 * ((2 + 2 + 2 * kv + 2 * mlp) * unit + log_sum_exp)
    assert second < most * total.stats.bytes_disk  # in half precision the norms save single precision
    total.close()
    middle.close()


def test_gpt2_bytes(tmp_path: Path) -> None:
    """GELU written out as tanh saves many tensors of four units each, and the middle level moves none of them."""
    total = moved(make("gpt2"), causal(2), 1.0, tmp_path)
    middle = moved(make("gpt2"), causal(2), (0, 1, 0), tmp_path)
    unit = 2 * SEQ * 32 * 4
    assert middle.stats.bytes_disk == 2 * (10 * unit + 2 * SEQ * 4 * 4)
    assert middle.stats.bytes_disk < 0.5 * total.stats.bytes_disk
    total.close()
    middle.close()


@pytest.mark.parametrize("name", ["gpt", "our llama", "gpt2", "llama", "opt, dropout"])
def test_costs_of_all_levels_are_told_and_true(name: str, tmp_path: Path) -> None:
    forward = ours(2) if name in GPTS else causal(2)
    model = make(name)
    manager = memo.offload(model, alpha=(0.25, 0.5, 0.25), disk=tmp_path, min_bytes=1)
    train(model, lambda step: forward(model, step), manager, steps=2)
    costs = manager.levels_profile()
    manager.close()
    assert [cost.layer for cost in costs] == [layer.name for layer in manager.layers]
    for cost in costs:
        whole, *others = cost.points
        assert (whole.name, whole.recompute_s) == ("all", 0)
        assert all(point.recompute_s > 0 for point in others)
        assert [point.saved_bytes for point in cost.points] == sorted(
            (point.saved_bytes for point in cost.points), reverse=True
        )
    for alpha, point in [(1.0, "all"), (0.0, "attention")]:
        again = moved(make(name), forward, alpha, tmp_path)
        told = [{each.name: each.saved_bytes for each in cost.points}[point] for cost in costs]
        assert again.stats.bytes_disk == sum(told[:-1])  # the last layer stays: its backward comes next
        again.close()


def test_costs_are_of_the_last_length_though_no_trial_was_run_at_it(tmp_path: Path) -> None:
    model = make("gpt")
    manager = memo.offload(model, alpha=0, disk=tmp_path, min_bytes=1)
    told = []
    for tokens in (24, 56, 24):
        ids = token_ids(0, 1)[:, : tokens + 1]
        with manager:
            loss = model(ids[:, :-1], ids[:, 1:])
        loss.backward()
        told.append({(cost.tokens, cost.points[0].saved_bytes) for cost in manager.levels_profile()})
    manager.close()
    ((_, saved),) = told[0]
    assert told == [{(24, saved)}, {(56, saved * 56 // 24)}, {(24, saved)}]


@pytest.mark.parametrize("wrong", [(0.5, 0.6, 0.1), (-0.5, 1, 0.5), (math.nan, 0, 1), (1, 0), "swap", True, {}])
def test_levels_that_cannot_mean_anything(wrong: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^alpha: "):
        memo.offload(gpt("gpt"), alpha=wrong, disk=tmp_path)


@pytest.mark.parametrize("wrong", [{9: 0.5}, {-1: 0.5}, {"layers.9": 0.5}])
def test_levels_of_a_layer_that_is_not_there(wrong: Any, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no layer"):
        memo.offload(gpt("gpt"), levels=wrong, disk=tmp_path)


def test_levels_are_not_changed_within_a_forward(tmp_path: Path) -> None:
    manager = memo.offload(gpt("gpt"), disk=tmp_path)
    with manager, pytest.raises(UsageError, match="between forwards"):
        manager.choose_levels({0: 0.5})
    manager.close()
