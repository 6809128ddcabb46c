"""Bytes and times of a layer as a framework runs it, against the formulas of Korthikanti et al. 2022."""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from benchmarks.published.framework_layer import FrameworkLayer
from benchmarks.published.framework_training import AttentionKernel, FrameworkTraining, Kernels, Recompute
from benchmarks.published.kernel_times import KernelRates, KernelTimes
from benchmarks.published.transformer import Experts, Transformer
from memo.gpt import GPTConfig
from memo.gpt.arithmetic import StepLayout
from memo.mip.inputs import hardware_preset

FORMULAS = Path(__file__).parents[2] / "benchmarks" / "data" / "published" / "korthikanti_table2_formulas.csv"
S, B, H, A, T = 2048, 4, 6144, 64, 8
MODEL = GPTConfig(vocab_size=51_200, hidden=H, layers=48, heads=A, kv_heads=A, ffn=4 * H, max_seq=S)
DROPPED = FrameworkTraining(attention=AttentionKernel.MATERIALISED, dropout=0.1, attention_dropout=0.1)
STATISTICS = 16  # bytes of a token: mean and deviation of two norms, which the paper leaves out


def layer(training: FrameworkTraining, *, tp: int = 1, config: GPTConfig = MODEL, **layout: Any) -> FrameworkLayer:
    machine = hardware_preset("a100-80g")
    times = KernelTimes(machine, KernelRates(matmul_efficiency=0.7, half_size=64, attention_efficiency=0.4))
    size = {"tokens": S, "batch": B, "gpus": tp, "tp": tp} | layout
    return FrameworkLayer(config, StepLayout(**size), training, times)


CASES = {
    "none": (DROPPED, 1, 34 * H + 5 * A * S),
    "TP": (dataclasses.replace(DROPPED, sequence_parallel=False), T, 10 * H + (24 * H + 5 * A * S) / T),
    "TP+SP": (DROPPED, T, (34 * H + 5 * A * S) / T),
    "TP+selective": (
        dataclasses.replace(DROPPED, sequence_parallel=False, recompute=Recompute.SCORES),
        T,
        10 * H + 24 * H / T,
    ),
    "TP+SP+selective (=flash attention)": (dataclasses.replace(DROPPED, recompute=Recompute.SCORES), T, 34 * H / T),
    "full recompute": (dataclasses.replace(DROPPED, recompute=Recompute.FULL), 1, 2 * H),
}


@pytest.mark.parametrize("name", CASES)
def test_saved_bytes_are_those_of_the_papers_table_2(name: str) -> None:
    with FORMULAS.open() as file:
        listed = {row[0] for row in csv.reader(line for line in file if not line.startswith("#"))}
    assert name in listed, "the table has this configuration"
    training, tp, per_token = CASES[name]
    found = layer(training, tp=tp).saved_bytes / (S * B)
    beside = STATISTICS / (tp if training.sequence_parallel else 1) if training.recompute is not Recompute.FULL else 0
    assert found == pytest.approx(per_token + beside, rel=1e-12)


def test_fused_attention_saves_a_statistic_of_each_row_instead_of_scores() -> None:
    scores = layer(dataclasses.replace(DROPPED, recompute=Recompute.SCORES)).saved_bytes
    fused = layer(dataclasses.replace(DROPPED, attention=AttentionKernel.FUSED)).saved_bytes
    assert fused - scores == 4 * A * S * B


def test_full_recompute_repeats_a_forward_and_holds_a_layer() -> None:
    plain, full = (layer(dataclasses.replace(DROPPED, recompute=method)) for method in (Recompute.NONE, Recompute.FULL))
    assert full.backward.total == pytest.approx(plain.backward.total + plain.forward.total)
    more = full.backward_transient_bytes - plain.backward_transient_bytes
    assert more == pytest.approx(plain.whole_bytes - full.saved_bytes)


def test_checkpoints_that_stop_early_leave_the_last_product_out() -> None:
    full = layer(dataclasses.replace(DROPPED, recompute=Recompute.FULL))
    early = layer(dataclasses.replace(DROPPED, recompute=Recompute.FULL, stops_early=True))
    last = full.times.product_s(S * B, H, 4 * H)
    assert full.backward.total - early.backward.total == pytest.approx(last)


def test_fp8_shortens_products_and_nothing_else() -> None:
    machine = hardware_preset("h100")
    rates = KernelRates(matmul_efficiency=0.7, attention_efficiency=0.4, fp8_gain=1.5)
    slow, fast = (
        FrameworkLayer(
            MODEL, StepLayout(tokens=S, batch=B), FrameworkTraining(fp8=fp8), KernelTimes(machine, rates)
        ).forward
        for fp8 in (False, True)
    )
    assert slow.products == pytest.approx(1.5 * fast.products)
    assert (slow.attention, slow.passes, slow.exchange) == (fast.attention, fast.passes, fast.exchange)


def test_grouped_queries_and_heads_of_another_size_change_the_projection() -> None:
    config = Transformer(
        vocab_size=1000, hidden=5120, layers=2, heads=64, kv_heads=8, head_size=128, ffn=25600, max_seq=S, mlp="swiglu"
    )
    assert config.qkv_width == (64 + 16) * 128
    whole = layer(FrameworkTraining(), config=config)
    grouped = 4 * 2 * 5120 + 16 + 2 * (config.qkv_width + 64 * 128) + 4 * 64 + 3 * 2 * 25600
    assert whole.saved_bytes == pytest.approx(grouped * S * B)


def test_ranks_that_share_key_value_heads_exchange_a_copy_for_each() -> None:
    config = dataclasses.replace(MODEL, kv_heads=8)
    whole, shared = (cp * layer(FrameworkTraining(), config=config, gpus=cp, cp=cp).saved_bytes for cp in (8, 16))
    of_head = 2 * H // A * S * B
    assert shared - whole == pytest.approx(2 * 8 * of_head), "eight more heads each of keys and values"


def test_experts_get_each_tokens_copies() -> None:
    dense = Transformer(vocab_size=1000, hidden=512, layers=2, heads=8, kv_heads=8, ffn=2048, max_seq=S)
    routed = dataclasses.replace(dense, experts=Experts(count=8, per_token=2, ffn=2048, ranks=8))
    one, two = layer(FrameworkTraining(), config=dense), layer(FrameworkTraining(), config=routed)
    mlp = 2 * 2 * 2048
    assert two.saved_bytes - one.saved_bytes == pytest.approx((2 * (mlp + 2 * 2048 + 2 * 2 * 512) - mlp) * S * B)


def test_eager_norms_read_and_write_more_than_fused_ones() -> None:
    config = dataclasses.replace(MODEL, norm="rmsnorm", mlp="swiglu", positions="rotary", bias=False)
    fused, eager = (
        layer(FrameworkTraining(kernels=kernels), config=config) for kernels in (Kernels.FUSED, Kernels.EAGER)
    )
    assert eager.forward.passes > 2 * fused.forward.passes
    assert eager.saved_bytes > fused.saved_bytes


def test_tensor_parallelism_waits_less_where_its_collectives_overlap() -> None:
    waits, pieces = (
        layer(FrameworkTraining(overlaps_tensor=overlaps), tp=8).forward.exchange for overlaps in (False, True)
    )
    assert pieces == pytest.approx(waits / 8), "the products take longer than seven of eight pieces"
    sums = layer(FrameworkTraining(overlaps_backward_sums=True, sequence_parallel=False), tp=8).backward.exchange
    gathers = layer(FrameworkTraining(overlaps_backward_sums=True), tp=8).backward.exchange
    assert (sums, gathers) == (0.0, pytest.approx(waits / 2))


def test_tensor_parallelism_beyond_a_node_takes_the_networks_time() -> None:
    within, beyond = (layer(FrameworkTraining(), tp=tp, gpus=tp).forward.exchange for tp in (8, 16))
    # Eight NICs together carry less than one GPU's links to its peers.
    assert beyond > 1.2 * within
