"""Fixed methods of recompute are points of the layers that plans use: one model answers for the bytes of both."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import pytest
from recorded_layers import MIDDLE, TOKENS, clipped, peak, shape

from memo.allocator import AllocationTrace
from memo.gpt import EmbeddingGradients, MoeConfig, Precision, preset
from memo.gpt.arithmetic import RecomputeMethod, StepLayout, TrainingMethod, derive_profile
from memo.mip.activation import ActivationPlan, ActivationProblem, Budgets, Pipeline, solve_problem
from memo.mip.inputs import Profile, hardware_preset
from memo.record import SavedRole, gpt_step, record_step

ROOMY = dataclasses.replace(hardware_preset("h100"), device_bytes=1 << 50)
SEVEN = preset("7b", max_seq=8192)
CASES = {
    "one GPU": (SEVEN, StepLayout(tokens=8192), {}),
    "eight GPUs": (SEVEN, StepLayout(tokens=8192, batch=2, gpus=8), {"accumulate": 4}),
    "tensor and context": (preset("llama3-8b"), StepLayout(tokens=8192, gpus=8, tp=4, cp=2), {}),
    "ring": (SEVEN, StepLayout(tokens=8192, gpus=8, cp=8, ring=True), {}),
    "pipeline": (preset("350m"), StepLayout(tokens=1024, gpus=4, pp=2), {"accumulate": 4}),
    "autocast": (preset("llama3-8b"), StepLayout(tokens=4096, gpus=2), {"precision": Precision.BF16_AUTOCAST}),
    "adapters": (SEVEN, StepLayout(tokens=4096, gpus=2), {"method": TrainingMethod(lora=16)}),
    "experts": (
        dataclasses.replace(SEVEN, moe=MoeConfig(experts=8, expert_hidden=4096)),
        StepLayout(tokens=4096, gpus=8, ep=4),
        {},
    ),
    "local attention": (preset("mgpt-1.3b"), StepLayout(tokens=2048, gpus=2), {}),
    "rows of the embedding": (
        SEVEN,
        StepLayout(tokens=512, gpus=2),
        {"method": TrainingMethod(embedding=EmbeddingGradients.SPARSE)},
    ),
}


def derived(case: str, recompute: RecomputeMethod | None) -> Profile:
    config, layout, more = CASES[case]
    method = dataclasses.replace(more.get("method", TrainingMethod()), recompute=recompute)
    return derive_profile(config, ROOMY, layout, **{**more, "method": method})


def plan(case: str, recompute: RecomputeMethod | None) -> ActivationPlan:
    _, layout, more = CASES[case]
    return solve_problem(
        ActivationProblem(
            profile=derived(case, recompute),
            hardware=ROOMY,
            budgets=Budgets(device_bytes=ROOMY.device_bytes),
            pipeline=Pipeline(stages=layout.pp, microbatches=more.get("accumulate", 1)),
        )
    )


@pytest.mark.parametrize("case", CASES)
def test_where_everything_fits_a_plan_is_the_method_that_recomputes_nothing(case: str) -> None:
    own, none, selective = (plan(case, how) for how in (None, RecomputeMethod.NONE, RecomputeMethod.SELECTIVE))
    assert own.stages == none.stages == selective.stages
    assert own.step_s == none.step_s == selective.step_s


@pytest.mark.parametrize("case", CASES)
def test_full_recompute_keeps_inputs_and_repeats_every_layer(case: str) -> None:
    config, layout, more = CASES[case]
    kept, again = (derived(case, how) for how in (RecomputeMethod.NONE, RecomputeMethod.FULL))
    element = 4 if more.get("precision") is Precision.BF16_AUTOCAST else 2
    for whole, layer in zip(kept.classes, again.classes, strict=True):
        assert layer.full_bytes == element * config.hidden * layout.rank_tokens
        assert layer.backward_s == whole.backward_s + whole.forward_s
        assert layer.static == whole.static
    assert dataclasses.replace(again, classes=kept.classes) == kept, "all else is the same"


@pytest.mark.parametrize("precision", list(Precision))
@pytest.mark.parametrize("sizes", [{"positions": "rotary"}, {"positions": "learned"}, {"mlp_tiles": 8}], ids=str)
def test_full_recompute_saves_and_holds_what_a_checkpointed_step_does(
    sizes: dict[str, Any], precision: Precision
) -> None:
    config = shape(**sizes)
    step = functools.partial(gpt_step, config, batch=1, tokens=TOKENS, precision=precision)
    recording = record_step(step, exact=True, checkpointed=True)
    (layer,) = derive_profile(
        config,
        ROOMY,
        StepLayout(tokens=TOKENS),
        precision=precision,
        method=TrainingMethod(recompute=RecomputeMethod.FULL),
    ).classes
    assert recording.saved_nbytes[SavedRole.INPUT] == config.layers * layer.full_bytes
    found, most = backward_peak(recording.trace), layer.backward_transient_bytes
    # Gradients of weights come on top, which do not grow with the tokens: two of the MLP's matrices at a time.
    assert most <= found <= most + 2 * 4 * config.hidden * config.ffn


def backward_peak(trace: AllocationTrace) -> int:
    """Bytes in the middle layer's backward, but for what forward left and gradients of parameters."""
    own = [a for a in trace.allocations if a.group == f"{MIDDLE}.backward"]
    made = [a for a in trace.allocations if a.phase == "backward" and a.upper < trace.end]
    return peak(clipped(made, min(a.lower for a in own), max(a.upper for a in own)))
