"""Settings of every test: one compute thread, so that results repeat and two cores are shared fairly."""

from __future__ import annotations

import gc
import os
import sys

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # in the processes that tests start, too

pytest_plugins = ["failing_seed", "hypothesis_settings", "slow_tests"]


def pytest_collection_finish() -> None:
    """Imports and the tests themselves stay until the end: no collection of garbage looks through them, a second each."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _one_compute_thread() -> None:
    torch = sys.modules.get("torch")  # tests of packages that need no torch must not import it here
    if torch is not None:
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _no_line_by_the_clock(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A command that waits on a busy machine says so after ten seconds; but in its own tests it would be a second line."""
    progress = sys.modules.get("memo.cli.terminal.progress")
    if progress is not None and "progress" not in request.node.nodeid:
        monkeypatch.setattr(progress, "LOG_AFTER_S", 3600.0)
