"""What a ring holds: the arithmetic's figures against what torch's loops allocate, rank by rank, and a plan's step."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from memo.allocator import AllocationRecorder, BytelessMode
from memo.dry_run import dry_run
from memo.dry_run.recorded_collectives import IssuedCollectives
from memo.gpt import Precision, preset
from memo.gpt.arithmetic import PlannedRun, StepLayout, derive_profile
from memo.gpt.arithmetic.block_bytes import RING_FLOAT, RING_HALF
from memo.mip.activation import ActivationProblem, Budgets, Pipeline, solve_problem
from memo.mip.inputs import hardware_preset
from memo.parallel import ContextAttention, Layout, Ring, simulated_rank

TOKENS, HEADS, WIDTH = 1024, 8, 64
UNIT = TOKENS * HEADS * WIDTH
"""Numbers in a tensor of h."""


def held(ranks: int, rank: int, dtype: torch.dtype, kv_heads: int) -> tuple[float, float]:
    """Peaks of what forward and backward allocate, in units of h."""
    with simulated_rank(Layout(cp=ranks), rank) as world:
        ring, recorder = Ring(world.group("cp")), AllocationRecorder()
        with BytelessMode(assume=1.0), recorder, IssuedCollectives():
            q, k, v = (
                torch.empty(1, TOKENS, heads, WIDTH, dtype=dtype, requires_grad=True)
                for heads in (HEADS, kv_heads, kv_heads)
            )
            gradient = torch.empty(1, TOKENS, HEADS, WIDTH, dtype=dtype)
            recorder.begin_step()
            out = ring(q, k, v)
            forward = recorder.trace(exact=True).peak_nbytes
            recorder.begin_step()
            out.backward(gradient)
            backward = recorder.trace(exact=True).peak_nbytes
    return forward / UNIT / dtype.itemsize, backward / UNIT / dtype.itemsize


@pytest.mark.parametrize(
    ("dtype", "figures"), [(torch.bfloat16, RING_HALF), (torch.float32, RING_FLOAT)], ids=["half", "float32"]
)
@pytest.mark.parametrize("kv_heads", [8, 2])
def test_the_figures_are_what_the_fullest_rank_holds(
    dtype: torch.dtype, figures: tuple[float, float], kv_heads: int
) -> None:
    repeated = 2 * (kv_heads < HEADS)  # keys and values of all queries' heads
    for way, figure in enumerate(figures):
        most = max(held(ranks, rank, dtype, kv_heads)[way] for ranks, rank in ((2, 1), (4, 0), (4, 1), (8, 3)))
        assert 0.98 * (figure + repeated) <= most <= figure + repeated


@pytest.mark.parametrize(("variant", "kv_heads", "tp"), [("gpt", 8, 1), ("llama", 2, 1), ("llama", 2, 2)])
def test_a_step_in_a_ring_holds_no_more_than_its_plan_says(variant: str, kv_heads: int, tp: int) -> None:
    config = preset("tiny", variant=variant, layers=4, hidden=512, heads=8)
    config = dataclasses.replace(config, kv_heads=kv_heads, ffn=1024, max_seq=32768)
    machine = hardware_preset("h100")
    sizes = StepLayout(tokens=32768, gpus=4 * tp, tp=tp, cp=4, ring=True)
    profile = derive_profile(config, machine, sizes, name="tiny")
    budgets = Budgets(device_bytes=1 << 40, host_bytes=0, disk_bytes=0, ranks_per_node=4 * tp)
    plan = solve_problem(
        ActivationProblem(profile=profile, hardware=machine, budgets=budgets, pipeline=Pipeline(stage_ranks=sizes.gpus))
    )
    layout = Layout(cp=4, tp=tp, cp_attention=ContextAttention.RING)
    run = PlannedRun(
        config=config, precision=Precision.BF16, layout=layout, tokens=32768, rows=1, microbatches=1, plan=plan
    )
    assert dry_run(run).disagreements == ()
