"""Terminal tables of a step's figures and of the comparison of two runs.

Names from trace files are stripped of control characters and markup before they reach the terminal.
"""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from memo.trace import DiffRow, RankReport, StepStats, duration, percent, printable, rate
from memo.units import format_bytes

_NARROWEST = 120  # columns; a terminal of fewer wraps a line, where rich would cut the numbers in it


def _console() -> Console:
    wide = shutil.get_terminal_size().columns if sys.stdout.isatty() else _NARROWEST
    return Console(width=max(wide, _NARROWEST), highlight=False, soft_wrap=True)


def _text(name: str) -> str:
    """Name from a file, without control characters and markup."""
    return escape(printable(name))


def print_stats(one: RankReport, step: StepStats) -> None:
    """Prints the verdict, then every figure of one rank and step."""
    console = _console()
    for sentence in one.verdicts[step.step]:
        console.print(Text(sentence.text))
    of = f"rank {one.trace.rank} of {one.trace.world_size}"
    console.print(f"\n{of}, " + (f"step {step.step}" if step.step is not None else f"all {len(one.stats.steps)} steps"))
    for table in (_times(step), _lanes(step), _peaks(step), _stalls(step), _layers(step)):
        if table.row_count:
            console.print()
            console.print(table)


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place else "left")
    return table


def _times(step: StepStats) -> Table:
    table = _table("time", "")
    for name, ns in (
        ("step", step.duration_ns),
        ("forward", step.forward_ns),
        ("backward", step.backward_ns),
        ("recompute", step.recompute_ns),
        ("stalls", step.stall_ns),
        *([("collectives", step.communication_ns)] if step.communication_ns else []),
    ):
        table.add_row(name, duration(ns))
    table.add_row("copies hidden", percent(step.overlap_percent))
    prefetch = step.prefetch
    table.add_row("prefetch hits", percent(prefetch.hit_percent))
    if prefetch.late:
        table.add_row("  of these late", f"{prefetch.late:,}")
    return table


def _lanes(step: StepStats) -> Table:
    table = _table("lane", "copies", "moved", "busy", "rate", "link", "of link")
    for lane in step.lanes:
        if not lane.copies:
            continue
        share = None
        if lane.bytes_per_s and lane.link_bytes_per_s:
            share = 100 * lane.bytes_per_s / lane.link_bytes_per_s
        table.add_row(
            lane.lane.value,
            f"{lane.copies:,}",
            format_bytes(lane.nbytes),
            duration(lane.busy_ns),
            rate(lane.bytes_per_s),
            rate(lane.link_bytes_per_s),
            percent(share),
        )
    return table


def _peaks(step: StepStats) -> Table:
    table = _table("peak", "saved", "plan", "all", "budget", "free")
    for peak in step.peaks:
        if not peak.used_nbytes:
            continue
        free = None if peak.budget_nbytes is None else peak.budget_nbytes - peak.used_nbytes
        shown = [peak.saved_nbytes, peak.predicted_nbytes, peak.measured_nbytes, peak.budget_nbytes, free]
        table.add_row(peak.tier.value, *("–" if nbytes is None else format_bytes(nbytes) for nbytes in shown))
    return table


def _stalls(step: StepStats) -> Table:
    table = _table("stall", "count", "total", "longest")
    for stall in step.stalls:
        table.add_row(stall.cause.value, f"{stall.count:,}", duration(stall.total_ns), duration(stall.longest_ns))
    return table


def _layers(step: StepStats) -> Table:
    table = _table("worst layers", "stalls", "recompute", "moved")
    for cost in step.worst_layers:
        table.add_row(
            _text(cost.layer) or "unnamed",
            duration(cost.stall_ns),
            duration(cost.recompute_ns),
            format_bytes(cost.moved_nbytes),
        )
    return table


def print_diff(a: str, b: str, rows: Sequence[DiffRow]) -> None:
    """Prints the figures of two runs side by side."""
    table = Table(title="a: " + _text(a) + "\nb: " + _text(b), title_justify="left", box=None, pad_edge=False)
    for name in ("", "a", "b", "change", ""):
        table.add_column(name, justify="left" if not name else "right")
    for row in rows:
        change = row.change_percent
        shown = "–" if change is None else f"{change:+.1f} %"
        table.add_row(row.name, row.shown(row.a), row.shown(row.b), shown, row.word)
    _console().print(table)
