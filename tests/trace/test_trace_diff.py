"""Two runs side by side: the change of each figure and whether it is for the better."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from memo.events import Lane, Span, Stall, StallCause, StepMark
from memo.trace import DiffRow, Trace, TraceReport, build_report, compare_reports

MakeTrace = Callable[..., Trace]
MS = 1_000_000


def run(make_trace: MakeTrace, *, step_ms: int, copy_ms: int, stall_ms: int) -> TraceReport:
    events = [
        StepMark(t=0, step=0, phase="begin"),
        Span(t=0, d=copy_ms * MS, step=0, lane=Lane.D2H, id=1, nbytes=10**9),
        StepMark(t=step_ms * MS, step=0, phase="end"),
    ]
    if stall_ms:
        events.append(Stall(t=1, d=stall_ms * MS, step=0, cause=StallCause.DRAIN))
    return build_report([make_trace(events)])


def test_a_figure_is_better_or_worse_by_its_own_direction(make_trace: MakeTrace) -> None:
    slow = run(make_trace, step_ms=1000, copy_ms=100, stall_ms=50)
    fast = run(make_trace, step_ms=900, copy_ms=50, stall_ms=0)
    rows = {row.name: row for row in compare_reports(slow, fast)}
    assert rows["step"].change_percent == pytest.approx(-10)
    assert rows["step"].word == "better"
    assert rows["d2h rate"].change_percent == pytest.approx(100)
    assert rows["d2h rate"].word == "better"
    assert {row.name: row.word for row in compare_reports(fast, slow)}["d2h rate"] == "worse"
    assert rows["d2h moved"].word == ""


def test_a_figure_that_only_one_run_has_is_shown_and_not_compared(make_trace: MakeTrace) -> None:
    stalled = run(make_trace, step_ms=1000, copy_ms=100, stall_ms=50)
    smooth = run(make_trace, step_ms=1000, copy_ms=100, stall_ms=0)
    (row,) = [row for row in compare_reports(smooth, stalled) if row.name == "drain stalls"]
    assert tuple(row.cells.values())[1:] == ("–", "50 ms", "–", "")


@pytest.mark.parametrize(("b", "word"), [(100.9, ""), (101.1, "worse"), (98.9, "better")])
def test_a_change_under_one_percent_is_none(b: float, word: str) -> None:
    assert DiffRow(name="x", a=100.0, b=b, unit="ns").word == word
