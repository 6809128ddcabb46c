"""Settings of every test: one compute thread, so that results repeat and two cores are shared fairly."""

from __future__ import annotations

import sys

import pytest


@pytest.fixture(autouse=True)
def _one_compute_thread() -> None:
    torch = sys.modules.get("torch")  # tests of packages that need no torch must not import it here
    if torch is not None:
        torch.set_num_threads(1)
