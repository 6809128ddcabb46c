"""`memo train --pipeline-dtype bf16`: half of the bytes between stages, within the bound of bfloat16, and refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
from ready_ranks import run_ranks

from memo.errors import UsageError
from memo.gpt import OffloadConfig, Precision, RunConfig, TrainConfig, preset
from memo.gpt.optim import LrSchedule
from memo.parallel import Layout

WORKER = Path(__file__).parent / "pipeline_worker.py"


@pytest.mark.parametrize(
    ("ranks", "schedules"),
    [
        (2, ["1f1b", "interleaved-1f1b", "zbv"]),
        pytest.param(4, ["gpipe", "interleaved-zero-bubble"], marks=pytest.mark.parallel),
    ],
)
def test_stages_pass_half_of_the_bytes_to_the_same_losses(ranks: int, schedules: list[str]) -> None:
    done = run_ranks(ranks, WORKER, *schedules, timeout=250)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": half of the bytes") == len(schedules)


@pytest.mark.parametrize(
    ("layout", "precision", "reason"),
    [
        (Layout(), None, "--pipeline-dtype bf16 has no meaning without --pp"),
        (Layout(pp=2), Precision.BF16, "stages pass on bfloat16 already"),
    ],
)
def test_where_it_does_nothing_it_is_refused(layout: Layout, precision: Precision | None, reason: str) -> None:
    training = TrainConfig(schedule=LrSchedule(peak=1e-3, floor=1e-4, warmup=0, steps=10))
    with pytest.raises(UsageError, match=reason):
        RunConfig(
            model="tiny",
            shape=preset("tiny"),
            seq=64,
            batch=1,
            training=training,
            precision=precision,
            layout=layout,
            offload=OffloadConfig(),
            pipeline_dtype="bf16",
        )
