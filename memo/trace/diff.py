"""Comparison of two runs: the figures of each one's representative step, and the changes.

A DiffRow is one figure with both values and the change in percent of the first. It also says which direction is better,
so that a terminal or a script can say "worse" without knowing the figure.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Literal

from memo.trace.figures import StepStats
from memo.trace.format import duration, percent, rate, without_folders
from memo.trace.html_data import page_data
from memo.trace.report import TraceReport
from memo.units import format_bytes

Unit = Literal["ns", "bytes", "bytes_per_s", "percent"]
NOTABLE_PERCENT = 1.0
"""Smallest change that is called better or worse."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DiffRow:
    """One figure of two runs; None where a run has no such figure."""

    name: str
    a: float | None
    b: float | None
    unit: Unit
    better: int = -1
    """-1 when less is better, +1 when more is, 0 when neither."""

    @property
    def change_percent(self) -> float | None:
        """Change in percent of `a`; None without a value to compare with."""
        if self.a is None or self.b is None or not self.a:
            return None
        return 100 * (self.b - self.a) / self.a

    @property
    def word(self) -> str:
        """`better`, `worse`, or empty for a small change or a neutral figure."""
        change = self.change_percent
        if change is None or abs(change) < NOTABLE_PERCENT or not self.better:
            return ""
        return "better" if change * self.better > 0 else "worse"

    @property
    def cells(self) -> dict[str, str]:
        """Name, both values in the row's unit, the change and the word, as texts."""
        a, b = ("–" if value is None else _SHOWN[self.unit](value) for value in (self.a, self.b))
        change = "–" if self.change_percent is None else f"{self.change_percent:+.1f} %"
        return {"name": self.name, "a": a, "b": b, "change": change, "word": self.word}


_SHOWN: dict[Unit, Callable[[float], str]] = {
    "ns": duration,
    "bytes": format_bytes,
    "bytes_per_s": rate,
    "percent": percent,
}


def compare_reports(a: TraceReport, b: TraceReport) -> list[DiffRow]:
    """Compares the representative steps of two runs; a row for every figure that either run has."""
    first, second = (one.of_rank(one.rank).step(one.step) for one in (a, b))
    left, right = dict(_figures(first)), dict(_figures(second))
    rows = []
    for name in {**left, **right}:
        unit, better, _ = left.get(name) or right[name]
        value_a, value_b = (side[name][2] if name in side else None for side in (left, right))
        rows.append(DiffRow(name=name, a=value_a, b=value_b, unit=unit, better=better))
    return rows


def diff_to_json(rows: list[DiffRow]) -> dict[str, Any]:
    """Converts rows to the format of `memo trace diff --json`: figures by name, each with its unit."""
    return {
        row.name: {"a": row.a, "b": row.b, "unit": row.unit, "change_percent": row.change_percent, "word": row.word}
        for row in rows
    }


def diff_sentence(rows: list[DiffRow]) -> str:
    """What changed from the first run's step to the second's, in one sentence: its time, and the parts that moved most."""
    by_name = {row.name: row for row in rows}
    step = by_name["step"]
    if not step.a or not step.b:
        return "One of the two runs has no finished step."
    change, difference = step.change_percent, step.b - step.a
    assert change is not None
    if abs(change) < NOTABLE_PERCENT:
        return f"Both steps took about as long: {duration(step.a)} and {duration(step.b)}."
    word = "longer" if difference > 0 else "shorter"
    said = f"The second step took {duration(step.b)}, {percent(abs(change))} {word} than the first ({duration(step.a)})"
    parts = {
        name: row.b - row.a
        for name in _PARTS
        if (row := by_name.get(name)) is not None and row.a is not None and row.b is not None
    }
    parts["backward"] -= parts["recompute"]  # which a backward's time contains
    toward = [(ns, name) for name, ns in parts.items() if ns * difference > 0]
    same = sorted(toward, key=lambda part: -abs(part[0]))[:2]
    named = [
        f"{name} {'+' if ns > 0 else '-'}{duration(abs(ns))}" for ns, name in same if abs(ns) > abs(difference) / 10
    ]
    return f"{said}: {', '.join(named)}." if named else f"{said}."


def diff_page(a: TraceReport, b: TraceReport, rows: list[DiffRow], *, names: tuple[str, str]) -> dict[str, Any]:
    """Data of the page that shows two runs one below the other, ready for `render_page`.

    Args:
        a: report of the first run.
        b: report of the second run.
        rows: of `compare_reports`.
        names: of the two runs, such as their files.
    """
    table = {"sentence": diff_sentence(rows), "rows": [row.cells for row in rows], "names": without_folders(names)}
    return {"diff": table, "pages": [page_data(one) for one in (a, b)]}


_PARTS = ("forward", "backward", "recompute", "stalls", "collectives")
_Figure = tuple[str, tuple[Unit, int, float | None]]


def _figures(step: StepStats) -> Iterator[_Figure]:
    yield "step", ("ns", -1, step.duration_ns)
    yield "forward", ("ns", -1, step.forward_ns)
    yield "backward", ("ns", -1, step.backward_ns)
    yield "recompute", ("ns", -1, step.recompute_ns)
    yield "stalls", ("ns", -1, step.stall_ns)
    yield "collectives", ("ns", -1, step.communication_ns)
    yield "added", ("percent", -1, step.added_percent)
    yield "copies hidden", ("percent", 1, step.overlap_percent)
    yield "prefetch hits", ("percent", 1, step.prefetch.hit_percent)
    for stall in step.stalls:
        yield f"{stall.cause} stalls", ("ns", -1, stall.total_ns)
    for lane in step.lanes:
        if lane.copies:
            yield f"{lane.lane} moved", ("bytes", 0, lane.nbytes)
            yield f"{lane.lane} rate", ("bytes_per_s", 1, lane.bytes_per_s)
    for peak in step.peaks:
        if peak.used_nbytes:
            yield f"{peak.tier} peak, saved", ("bytes", -1, peak.saved_nbytes)
            yield f"{peak.tier} peak, all", ("bytes", -1, peak.measured_nbytes)
