"""Settings of every test: one compute thread, so that results repeat and two cores are shared fairly."""

from __future__ import annotations

import os
import sys

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # in the processes that tests start, too

pytest_plugins = ["failing_seed", "hypothesis_settings"]


@pytest.fixture(autouse=True)
def _one_compute_thread() -> None:
    torch = sys.modules.get("torch")  # tests of packages that need no torch must not import it here
    if torch is not None:
        torch.set_num_threads(1)
