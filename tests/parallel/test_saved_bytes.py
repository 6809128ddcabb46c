"""Bytes that a rank holds for backward: p - s microbatches under 1F1B, with memo three layers of them on the device."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from launching import SCHEDULES, launch


@pytest.mark.parallel
def test_each_stage_holds_the_microbatches_its_schedule_says() -> None:
    said = launch(4, "bytes_worker.py")
    assert all(f"{schedule}: layers' worth" in said for schedule in SCHEDULES)
