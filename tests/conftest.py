"""Settings of every test: one compute thread, so that results repeat and two cores are shared fairly.

What a failed example of hypothesis was drawn from is printed, to be drawn again.
"""

from __future__ import annotations

import importlib.util
import os
import sys

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # in the processes that tests start, too

if importlib.util.find_spec("hypothesis") is not None:
    from hypothesis import settings

    settings.register_profile("memo", deadline=None, print_blob=True)
    settings.load_profile("memo")


@pytest.fixture(autouse=True)
def _one_compute_thread() -> None:
    torch = sys.modules.get("torch")  # tests of packages that need no torch must not import it here
    if torch is not None:
        torch.set_num_threads(1)
