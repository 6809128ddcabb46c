"""Routers that send all tokens to one rank's experts in some steps: equal bits, budgets kept, and told what was spilled.

One launch runs several alphas, since starting a process costs more than what it computes here.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from launching import launch, run

ALPHAS = "1,0.5,0"


def test_rows_beyond_the_plan_go_to_disk_bit_for_bit_and_are_told() -> None:
    """Ranks without rows are among them, and the steps after a skewed one."""
    told = launch(2, "skewed_worker.py", ALPHAS, "disk", "dp2_ep2")
    for alpha in ALPHAS.split(","):
        assert f"equal dp2_ep2 alpha {alpha} disk" in told


def test_without_a_disk_rows_beyond_the_plan_end_the_job_with_one_line() -> None:
    ended, said = run(2, "skewed_worker.py", "1", "spill", "dp2_ep2")
    assert ended
    lines = [line for line in said.splitlines() if "HostBudgetExceeded" in line]
    assert len(lines) == 1, said
    assert lines[0].startswith("[rank0]"), "experts of the first rank get all rows first"
    assert "give disk=..., on_full='recompute' or, above alpha 0, a smaller alpha" in lines[0]


CASES = {
    (2, "recompute"): ["dp2_ep2"],
    (4, "disk"): ["dp4_ep2", "dp4_ep4", "dp2_tp2_ep2"],
    (4, "recompute"): ["dp4_ep2"],
}
EVERY_CHANGE = {(2, "recompute")}
"""Cases that run with every change, as the tests above do."""


@functools.cache
def said(ranks: int, case: str) -> str:
    """One launch, also where it fails: what it printed before that still counts."""
    return run(ranks, "skewed_worker.py", ALPHAS, case, *CASES[ranks, case], timeout_s=500)[1]


@pytest.mark.parametrize(
    ("ranks", "case", "name"),
    [
        pytest.param(*key, name, marks=() if key in EVERY_CHANGE else pytest.mark.parallel)
        for key, names in CASES.items()
        for name in names
    ],
)
def test_skewed_routers_change_no_bit_at_any_layout(ranks: int, case: str, name: str) -> None:
    for alpha in ALPHAS.split(","):
        assert f"equal {name} alpha {alpha} {case}" in said(ranks, case), said(ranks, case)
