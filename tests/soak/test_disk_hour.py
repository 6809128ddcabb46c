"""A short disk hour finds nothing, and finds a flipped bit."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest
import torch

from memo.swap.disk import DiskStore
from tests.soak.disk_faults import KINDS, Kind
from tests.soak.disk_hour import Hour


@pytest.fixture(autouse=True)
def _as_it_was(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(DiskStore.__init__.__kwdefaults__, "open_file", DiskStore.__init__.__kwdefaults__["open_file"])
    monkeypatch.setattr("tests.soak.disk_hour.SPARE_BYTES", 0)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def _hour(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hour:
    """Ends when each fault has come once."""
    hour = Hour(argparse.Namespace(minutes=60.0, microbatches=4, fault_every=1, seed=0, write=False), tmp_path)
    monkeypatch.setattr("tests.soak.disk_hour.time.monotonic", lambda: 3600.0 * (len(hour.rows) >= len(KINDS)))
    return hour


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_steps_under_drive_faults_are_equal_or_end_in_an_error_that_names_the_drive(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(KINDS, "stalled drive (35 s)")  # too long for a test
    hour = _hour(tmp_path, monkeypatch)
    hour.go()
    body = hour.body()
    assert body["finds"] == []
    assert body["faults"] == dict.fromkeys(KINDS, 1)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_flipped_bit_is_a_find(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(KINDS):
        monkeypatch.delitem(KINDS, name)
    monkeypatch.setitem(KINDS, "flipped bit", Kind(first={"write": 0}, given={"flip": True}))
    hour = _hour(tmp_path, monkeypatch)
    hour.go()
    assert len(hour.finds) == 1
    assert "instead of" in hour.finds[0]
