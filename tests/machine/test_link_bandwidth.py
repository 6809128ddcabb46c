"""Measured rates of lanes on a machine that is too busy to do anything in the time given."""

from __future__ import annotations

from pathlib import Path

import torch

from memo.events import Lane
from memo.machine import measure_lanes


def test_a_rate_is_of_one_copy_at_least(tmp_path: Path) -> None:
    rates = measure_lanes(torch.device("cpu"), directories=[tmp_path], seconds=0.0)
    assert set(rates) == {Lane.DISK_WRITE, Lane.DISK_READ}  # a CPU has no link to its own memory
    assert min(rates.values()) > 0
