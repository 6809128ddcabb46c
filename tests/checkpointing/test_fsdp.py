"""memo.checkpoint, memo.saved_tensors and replaced checkpoints under FSDP2, on two ranks over gloo."""

from __future__ import annotations

from pathlib import Path

from ready_ranks import run_ranks

WORKER = Path(__file__).parent / "fsdp_worker.py"


def test_two_ranks_have_the_bits_of_fsdp_without_memo() -> None:
    done = run_ranks(2, WORKER, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("done") == 2
