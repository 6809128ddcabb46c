"""Plans with a codec, carried out: the bytes on links and in host memory are those that were planned."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

import memo
from memo.errors import PlanError
from memo.events import Lane, Span
from memo.gpt import GPTConfig, Precision, preset
from memo.gpt.arithmetic import StepLayout, TrainingMethod, derive_profile
from memo.gpt.model import GPT
from memo.gpt.model.init_weights import initialise
from memo.mip.activation import ActivationPlan, ActivationProblem, Budgets, LayerPlan, predict_stages
from memo.mip.inputs import hardware_preset
from memo.mip.simulate import StageSimulation, simulate, stage_events
from memo.swap import Stats

SEQ, BATCH, LAYERS = 128, 1, 4
SIZES = {"vocab_size": 61, "max_seq": SEQ, "layers": LAYERS, "hidden": 64, "heads": 4, "ffn": 256}
SHAPES = {
    "gpt2": preset("tiny", **SIZES, kv_heads=4, positions="learned", mlp="gelu", norm="layernorm"),
    "rotary": preset("tiny", **SIZES, kv_heads=4, positions="rotary", mlp="swiglu", norm="layernorm"),
}


def problem(config: GPTConfig, codec: str | None) -> ActivationProblem:
    machine = hardware_preset("h100")
    profile = derive_profile(
        config,
        machine,
        StepLayout(tokens=SEQ, batch=BATCH),
        precision=Precision.FP32,
        method=TrainingMethod(codec=codec),
    )
    budgets = Budgets(device_bytes=1 << 40, host_bytes=1 << 30)
    return ActivationProblem(profile=profile, hardware=machine, budgets=budgets)


def plan_of(config: GPTConfig, codec: str | None, layer: LayerPlan) -> ActivationPlan:
    """Every layer but the last one, which never moves, has this plan."""
    asked = problem(config, codec)
    layers = (layer,) * (LAYERS - 1) + (dataclasses.replace(layer, kept=1.0, host=0.0),)
    return ActivationPlan(problem=asked, layers=layers, stages=predict_stages(asked, layers))


def trained(config: GPTConfig, plan: ActivationPlan, codec: str | None) -> Stats:
    model = GPT(config, device="meta").to_empty(device="cpu")
    initialise(model, config, 0)
    manager = memo.offload(model, plan=plan, host="64MiB", min_bytes=1, codec=codec)
    tokens = torch.randint(0, 61, (BATCH, SEQ))
    with manager:
        loss = model(tokens, tokens)
    loss.backward()
    manager.step_done()
    stats = manager.stats
    manager.close()
    return stats


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("point", ["all", "matmuls", "attention"])
def test_the_bytes_that_move_are_the_planned_ones(point: str, shape: str) -> None:
    plan = plan_of(SHAPES[shape], "int8", LayerPlan(point=point, kept=0.0, host=1.0))
    stats = trained(SHAPES[shape], plan, "int8")
    (stage,) = simulate(plan).stages
    assert stats.bytes_host == plan.stages[0].peak_host_bytes == stage.moved_nbytes(Lane.D2H)
    spared = sum(
        layer.coding.spared_bytes * own.host
        for layer, own in zip(plan.problem.profile.layer_profiles(), plan.layers, strict=True)
        if layer.coding is not None and own.point == "all"
    )
    assert stats.bytes_coded - stats.bytes_codes == spared
    decoded = sum(span.decoded_nbytes or span.nbytes for span in copies_out(stage))
    assert decoded == stats.bytes_host + spared


def copies_out(stage: StageSimulation) -> list[Span]:
    """Copies to the host in the trace of a simulated stage."""
    events = stage_events(stage, end_s=stage.end_s)
    return [event for event in events if isinstance(event, Span) and event.lane is Lane.D2H]


@pytest.mark.parametrize("codec", [None, "fp8"])
def test_so_they_are_without_a_codec_and_with_the_other_one(codec: str | None) -> None:
    plan = plan_of(SHAPES["gpt2"], codec, LayerPlan(point="matmuls", kept=0.0, host=1.0))
    assert trained(SHAPES["gpt2"], plan, codec).bytes_host == plan.stages[0].peak_host_bytes


@pytest.mark.parametrize(
    ("planned", "runs", "words"),
    [
        ("int8", None, 'it is for codec int8, and the run has no codec; give codec="int8"'),
        (None, "fp8", "it is for no codec, and the run has codec fp8; leave the codec out"),
        ("fp8", "int8", 'it is for codec fp8, and the run has codec int8; give codec="fp8"'),
    ],
)
def test_a_plan_that_is_carried_out_with_another_codec_is_one_line(
    planned: str | None, runs: str | None, words: str
) -> None:
    plan = plan_of(SHAPES["gpt2"], planned, LayerPlan())
    with pytest.raises(PlanError, match=re.escape(words)):
        trained(SHAPES["gpt2"], plan, runs)
