"""Accelerate's FSDP1 and FSDP2 on two ranks over gloo, with checkpoints that are memo's or that memo replaces."""

from __future__ import annotations

from pathlib import Path

import pytest
from ready_ranks import run_ranks

pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("accelerate", reason="accelerate is not installed")


def test_two_ranks_train_as_without_memo() -> None:
    done = run_ranks(2, Path(__file__).parent / "fsdp_worker.py", timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("done") == 2
