"""Ranks whose batches differ in length, from each other and from step to step: gradients are equal, and nobody waits."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from launching import launch

CASES = ["ddp", "fsdp", "one_plan", "talking", "disagreeing"]


@pytest.mark.parallel
def test_two_ranks_with_other_lengths() -> None:
    said = launch(2, "lengths_worker.py", *CASES)
    assert all(f"equal {case}\n" in said for case in CASES)


@pytest.mark.parallel
def test_replicas_of_divided_models_with_other_lengths() -> None:
    assert "equal dp_tp\n" in launch(4, "lengths_worker.py", "dp_tp")
