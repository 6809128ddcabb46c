"""Bytes and FLOPs of recompute, by arithmetic."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import memo
from memo.gpt import preset
from memo.gpt.model import GPT

if TYPE_CHECKING:
    from pathlib import Path

LAYERS, BATCH, SEQ = 4, 2, 64
ATEN = torch.ops.aten


def model() -> GPT:
    torch.manual_seed(0)
    return GPT(preset("tiny", vocab_size=96, max_seq=SEQ))


def batch() -> torch.Tensor:
    return torch.randint(0, 96, (BATCH, SEQ), generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("alpha", [0.0, 0.25, 0.5, 0.75, 1.0])
def test_a_layer_moves_two_units_and_at_most_alpha_of_fourteen(
    alpha: float, dtype: torch.dtype, tmp_path: Path
) -> None:
    made = model().to(dtype)
    manager = memo.offload(made, alpha=alpha, disk=tmp_path, min_bytes=1)
    with manager:
        made(batch(), batch())
    config, tokens = made.config, BATCH * SEQ
    unit = tokens * config.hidden * dtype.itemsize
    statistics = 4 * tokens * (4 if dtype is torch.float32 else dtype.itemsize)  # mean and deviation of two norms
    log_sum_exp = tokens * config.heads * 4
    layer = 2 * unit + log_sum_exp + alpha * (14 * unit + statistics)
    moved = manager.stats.bytes_disk / (LAYERS - 1)  # the last layer stays: its backward comes next
    assert moved == layer if alpha in (0.0, 1.0) else layer - alpha * 14 * unit < moved <= layer
    manager.close()


def attention_flops(query: Any, key: Any, *_: Any, **__: Any) -> int:
    batch, heads, seq, size = query
    return int(2 * 2 * batch * heads * seq * key[2] * size)


def attention_backward_flops(_: Any, query: Any, key: Any, *__: Any, **___: Any) -> int:
    return attention_flops(query, key) * 5 // 2


FORMULAS = {
    ATEN._scaled_dot_product_flash_attention_for_cpu: attention_flops,
    ATEN._scaled_dot_product_flash_attention_for_cpu_backward: attention_backward_flops,
}


def flops(made: GPT, manager: memo.Manager | None) -> int:
    with FlopCounterMode(display=False, custom_mapping=FORMULAS) as counter:
        if manager is None:
            loss = made(batch(), batch())
        else:
            with manager:
                loss = made(batch(), batch())
        loss.backward()
    return counter.get_total_flops()


def test_no_attention_and_no_last_projection_is_computed_twice(tmp_path: Path) -> None:
    plain = flops(model(), None)
    checkpointed = model()
    for layer in checkpointed.layers:
        forward = layer.forward
        layer.forward = lambda *a, _forward=forward: checkpoint(_forward, *a, use_reentrant=False)
    config = checkpointed.config
    head = config.hidden // config.heads
    attention = attention_flops((BATCH, config.heads, SEQ, head), (BATCH, config.heads, SEQ, head))
    # Early stop: a checkpoint too leaves the last projection out.
    again = (flops(checkpointed, None) - plain) // LAYERS - attention
    assert again == 2 * BATCH * SEQ * config.hidden * (4 * config.hidden + config.ffn)  # q, k, v, out and up
    for alpha in (0.0, 0.25, 0.5, 1.0):
        made = model()
        manager = memo.offload(made, alpha=alpha, disk=tmp_path, min_bytes=1)
        for _ in range(2):  # in which the recompute is tried
            flops(made, manager)
        # The last layer's tensors are still there when its backward begins.
        repeated = (flops(made, manager) - plain) / (LAYERS - 1)
        assert repeated == (1 - alpha) * again if alpha in (0.0, 1.0) else 0 < repeated < again
        manager.close()
