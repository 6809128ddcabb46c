"""Starts workers as the ranks of a job and gives what they said. Shared by the tests here."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from memo.parallel import PipelineSchedule

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))  # workers import this file too
from ready_ranks import run_ranks

HERE = Path(__file__).parent
SPLITS_BACKWARD = torch.__version__ >= "2.13"
"""True if this torch runs zero-bubble schedules; memo refuses them on an older one."""
DIVIDES_FUSED = torch.__version__ >= "2.13"
"""True if it puts the gradients of GPT-2's fused projections together; likewise."""
_SPLIT = (PipelineSchedule.ZERO_BUBBLE, PipelineSchedule.ZERO_BUBBLE_V)
SCHEDULES = [schedule for schedule in PipelineSchedule if SPLITS_BACKWARD or schedule not in _SPLIT]
"""Schedules that this torch runs."""


def torchrun(ranks: int, *options: str) -> list[str]:
    """The command, up to the script."""
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *options]


def launch(ranks: int, worker: str, *arguments: str, timeout_s: float = 280) -> str:
    """What a worker of this folder printed, after all its ranks ended well."""
    ended, said = run(ranks, worker, *arguments, timeout_s=timeout_s)
    assert ended == 0, said
    return said


def run(ranks: int, worker: str, *arguments: str, timeout_s: float = 280) -> tuple[int, str]:
    """The exit code, and all that was printed."""
    done = run_ranks(ranks, HERE / worker, *arguments, timeout=timeout_s)
    return done.returncode, done.stdout + done.stderr
