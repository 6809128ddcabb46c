"""Decisions on a layout: from measured links and steps, by the search's own predictions."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from memo.adapt.adaptation import SHARE, LayoutAdapter
from memo.adapt.choices import LayoutChoice, require_adaptable
from memo.adapt.prices import Prices, Readings
from memo.cli.main import main
from memo.compression import GradientCompression
from memo.errors import CheckpointError, UsageError
from memo.gpt import (
    EmbeddingGradients,
    GPTConfig,
    MoeConfig,
    OffloadConfig,
    OffloadMode,
    Precision,
    RunConfig,
    TrainConfig,
)
from memo.gpt.optim import LrSchedule
from memo.gpt.train import ADAPTATION, EndedStep, LayoutDecision
from memo.machine import CollectiveFit, CollectiveRates
from memo.parallel import ContextAttention, Layout, PipelineSchedule

SHAPE = GPTConfig(vocab_size=256, max_seq=16, layers=1, hidden=1024, heads=4, kv_heads=4, ffn=4096)
RUN = RunConfig(
    model="tiny",
    shape=SHAPE,
    training=TrainConfig(schedule=LrSchedule.of(steps=1000)),
    seq=16,
    batch=4,
    layout=Layout(tp=4),
    checkpoint_dir=Path("kept"),
    offload=OffloadConfig(mode=OffloadMode.NONE),
    adapt=True,
)
SLOW_S, FAST_S = 80e-3, 2e-3
TP, DP = "tp 4, 1 x 4", "dp 4, 1 x 4"


@pytest.fixture(autouse=True)
def _four_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4", "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)


def rates(latency_s: float) -> CollectiveRates:
    fits = [
        CollectiveFit(
            collective=name,
            within_node=True,
            ranks=4,
            nodes=1,
            ranks_per_node=4,
            fewest_ranks_per_node=4,
            times=[],
            latency_s=latency_s,
            bytes_per_s=3e8,
            typical_error=0.0,
            largest_error=0.0,
        )
        for name in ("all_gather", "reduce_scatter", "all_to_all", "send")
    ]
    return CollectiveRates(world_size=4, backend="gloo", fits=fits, problems=[])


def ended(config: RunConfig, step: int = 10) -> EndedStep:
    return EndedStep(
        step=step,
        duration_s=1.0,
        config=config,
        shape=SHAPE,
        precision=Precision.FP32,
        device=torch.device("cpu"),
        manager=None,
    )


def begun(config: RunConfig, adapter: LayoutAdapter, *, step: int = 10) -> LayoutAdapter:
    """The adapter behind its first steps, without other ranks."""
    adapter._begin(ended(config, step))
    return adapter


def decided(
    adapter: LayoutAdapter, config: RunConfig, step_s: float, latency_s: float, *, step: int = 10
) -> LayoutDecision | None:
    readings = Readings(
        step_s=step_s, limit_bytes=4 << 30, peak_bytes=1 << 29, product_s=13e-3, copy_s=7e-3, launch_s=2e-5
    )
    return adapter.decide(ended(config, step), readings, rates(latency_s))


def after(adapter: LayoutAdapter, config: RunConfig) -> tuple[LayoutAdapter, RunConfig]:
    """The ranks in the layout of the state that a checkpoint has."""
    new = LayoutAdapter(config)
    config = new.resumed(dataclasses.replace(config, keeps_batch=True), {ADAPTATION: adapter.state()})
    return begun(config, new), config


def test_a_slow_link_takes_ranks_from_tp_to_dp_and_a_fast_one_back() -> None:
    adapter, config = begun(RUN, LayoutAdapter(RUN)), RUN
    for step_s, latency_s, here, there in ((2.5, SLOW_S, TP, DP), (1.1, FAST_S, DP, TP)):
        decision = decided(adapter, config, step_s, latency_s)
        assert decision is not None
        assert decision.changes
        assert (decision.figures["from"], decision.figures["to"]) == (here, there)
        assert decision.line.startswith(f"changes from {here} to {there}: ")
        assert decision.figures["expected_s"] < (1 - SHARE) * step_s
        adapter, config = after(adapter, config)
        assert LayoutChoice.of_run(config).words == there
    assert config.layout == RUN.layout


def test_where_predictions_fail_ranks_return_once_and_stay() -> None:
    """Steps of dp take longer than those of tp whatever is predicted: links do not change, so dp is not tried again."""
    adapter, config = begun(RUN, LayoutAdapter(RUN)), RUN
    found = []
    for _ in range(6):
        measured_s = 3.5 if config.layout.dp == 4 else 2.5
        decision = decided(adapter, config, measured_s, SLOW_S)
        found.append(decision is not None and decision.changes)
        if found[-1]:
            adapter, config = after(adapter, config)
    assert found == [True, True, False, False, False, False]
    assert config.layout == RUN.layout


def test_a_layout_that_was_left_is_tried_again_when_links_have_changed() -> None:
    adapter, config = begun(RUN, LayoutAdapter(RUN)), RUN
    decided(adapter, config, 2.5, SLOW_S)
    adapter, config = after(adapter, config)
    same = decided(adapter, config, 2.0, SLOW_S * (1 + SHARE / 2))
    assert same is not None
    assert not same.changes
    assert same.figures["to"] == TP
    assert same.figures["reason"] == "measured when it was left"
    other = decided(adapter, config, 2.0, FAST_S)
    assert other is not None
    assert other.changes
    assert other.figures["to"] == TP
    assert other.figures["reason"].startswith("by predictions of ")


def test_nothing_is_decided_until_a_measurement_has_changed_by_the_share() -> None:
    adapter = begun(RUN, LayoutAdapter(RUN))
    first = decided(adapter, RUN, 0.3, FAST_S)
    assert first is not None
    assert not first.changes
    assert first.line.startswith(f"keeps {TP}: 300 ms a step measured, all-gather 2 ms and 0.3 GB/s; ")
    assert decided(adapter, RUN, 0.3 * (1 + SHARE / 2), FAST_S) is None
    assert decided(adapter, RUN, 0.3 * (1 + 2 * SHARE), FAST_S) is not None
    assert decided(adapter, RUN, 0.3 * (1 + 2 * SHARE), SLOW_S) is not None


def test_a_change_must_pay_for_the_restart_in_the_steps_that_are_left() -> None:
    adapter = begun(RUN, LayoutAdapter(RUN), step=999)
    late = decided(adapter, RUN, 2.5, SLOW_S, step=999)
    assert late is not None
    assert not late.changes
    assert late.figures["steps_left"] == 1
    gained_s = 2.5 - late.figures["expected_s"]
    assert late.figures["saved_s"] == pytest.approx(gained_s - late.figures["cost_s"])
    assert late.figures["cost_s"] > gained_s > 0
    assert "steps left 1, restart " in late.line


def test_memory_decides_with_it() -> None:
    """Twelve bytes a parameter of a quarter of the model, and its whole weights and gradients, have no room."""
    adapter = begun(RUN, LayoutAdapter(RUN))
    readings = Readings(step_s=2.5, limit_bytes=110 << 20, peak_bytes=0, product_s=13e-3, copy_s=7e-3, launch_s=2e-5)
    decision = adapter.decide(ended(RUN), readings, rates(SLOW_S))
    assert decision is not None
    assert not decision.changes
    assert decision.figures.get("to") != DP


def test_with_experts_microbatches_stay_as_many() -> None:
    """A router's loss is of the choices of a microbatch: others would train another model."""
    moe = dataclasses.replace(SHAPE, moe=MoeConfig(experts=4, expert_hidden=64))
    one = dataclasses.replace(ended(RUN), shape=moe)
    readings = Readings(step_s=2.5, limit_bytes=4 << 30, peak_bytes=0, product_s=13e-3, copy_s=7e-3, launch_s=2e-5)
    prices = Prices(one, readings.machine(one.device, rates(SLOW_S)), readings)
    seen: dict[str, int] = {}
    while (found := prices.best(seen)) is not None:
        seen[found[0].words] = found[0].accumulate
    assert len(seen) > 2
    assert set(seen.values()) == {RUN.training.accumulate}


def test_another_number_of_ranks_or_sequences_begins_in_the_layout_of_its_flags(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    adapter = begun(RUN, LayoutAdapter(RUN))
    decided(adapter, RUN, 2.5, SLOW_S)
    saved = {ADAPTATION: adapter.state()}
    assert LayoutAdapter(RUN).resumed(RUN, saved).layout == Layout(dp=4)
    assert LayoutAdapter(RUN).resumed(RUN, {}) is RUN
    others = dataclasses.replace(RUN, batch=8)
    assert LayoutAdapter(RUN).resumed(others, saved) is others
    monkeypatch.setenv("WORLD_SIZE", "2")
    fewer = dataclasses.replace(RUN, layout=Layout(tp=2))
    assert LayoutAdapter(fewer).resumed(fewer, saved) is fewer
    with pytest.raises(CheckpointError, match="the checkpoint to resume is damaged: adaptation: choice has no layout"):
        LayoutAdapter(RUN).resumed(RUN, {ADAPTATION: {"choice": {}}})


@pytest.mark.parametrize(
    "layout",
    [
        Layout(dp=2, tp=2),
        Layout(cp=4, cp_attention=ContextAttention.RING),
        Layout(pp=2, dp=2, schedule=PipelineSchedule.GPIPE, stage_layers=(1, 3)),
        Layout(pp=4, schedule=PipelineSchedule.INTERLEAVED, chunks=3),
        Layout(dp=4, ep=2),
    ],
    ids=str,
)
def test_a_choice_and_its_candidate_are_of_one_layout(layout: Layout) -> None:
    choice = LayoutChoice(layout=layout, batch=8, accumulate=4)
    assert LayoutChoice.of_candidate(choice.candidate(dataclasses.replace(SHAPE, layers=4))) == choice


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"checkpoint_dir": None}, "--adapt needs --checkpoint-dir, from which ranks go on in another layout"),
        ({"offload": OffloadConfig(plan=Path("p.json"))}, "--plan p.json is of one layout; leave one of the two out"),
        ({"offload": OffloadConfig(alpha=0.5)}, "--alpha 0.5 is not priced in other layouts"),
        ({"offload": OffloadConfig(mode=OffloadMode.DISK)}, "--offload disk is not priced in other layouts"),
        ({"offload": OffloadConfig(disk=Path("/scratch"))}, "--disk /scratch is not priced in other layouts"),
        ({"compress_gradients": GradientCompression.parse("int8")}, "--compress-gradients needs --dp or --cp"),
        ({"layout": Layout(pp=4), "pipeline_dtype": "bf16"}, "--pipeline-dtype needs --pp"),
        ({"embedding_exchange": EmbeddingGradients.SPARSE}, "--embedding-exchange sparse needs --dp or --cp"),
        ({"layout": Layout(tp=4, sequence_parallel=False)}, "--no-sequence-parallel is not priced"),
        ({"layout": Layout(tp=4, tp_overlap=True)}, "--tp-overlap needs --tp"),
    ],
    ids=lambda value: "" if isinstance(value, str) else next(iter(value)),
)
def test_what_fixes_the_layout_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        require_adaptable(dataclasses.replace(RUN, **changes), ranks=4, under_torchrun=True)  # type: ignore[arg-type]


def test_one_process_is_refused_in_a_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("WORLD_SIZE")
    assert main(["train", "--adapt", "--checkpoint-dir", "kept"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == (
        "memo train: --adapt: one process has no other layout; start ranks with torchrun --nproc-per-node N"
    )
