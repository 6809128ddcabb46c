"""Terminal tables of a step's figures and of the comparison of two runs.

Names from trace files are stripped of control characters before they reach the terminal.
"""

from __future__ import annotations

from collections.abc import Sequence

from memo.trace import DiffRow, RankReport, StepStats, duration, percent, printable, rate
from memo.units import format_bytes, text_table


def print_stats(one: RankReport, step: StepStats) -> None:
    """Prints the verdict, then every figure of one rank and step."""
    for sentence in one.verdicts[step.step]:
        print(printable(sentence.text, limit=2000))
    of = f"rank {one.trace.rank} of {one.trace.world_size}"
    print(f"\n{of}, " + (f"step {step.step}" if step.step is not None else f"all {len(one.stats.steps)} steps"))
    for head, rows in (_times(step), _lanes(step), _peaks(step), _stalls(step), _layers(step)):
        if rows:
            print(f"\n{text_table(head, rows)}")


_Table = tuple[tuple[str, ...], list[tuple[str, ...]]]


def _times(step: StepStats) -> _Table:
    rows = [
        ("step", step.duration_ns),
        ("forward", step.forward_ns),
        ("backward", step.backward_ns),
        ("recompute", step.recompute_ns),
        ("stalls", step.stall_ns),
        *([("collectives", step.communication_ns)] if step.communication_ns else []),
    ]
    prefetch = step.prefetch
    shares = [("copies hidden", percent(step.overlap_percent)), ("prefetch hits", percent(prefetch.hit_percent))]
    late = [("  of these late", f"{prefetch.late:,}")] if prefetch.late else []
    return ("time", ""), [*((name, duration(ns)) for name, ns in rows), *shares, *late]


def _lanes(step: StepStats) -> _Table:
    rows: list[tuple[str, ...]] = []
    for lane in step.lanes:
        if not lane.copies:
            continue
        share = None
        if lane.bytes_per_s and lane.link_bytes_per_s:
            share = 100 * lane.bytes_per_s / lane.link_bytes_per_s
        rows.append(
            (
                lane.lane.value,
                f"{lane.copies:,}",
                format_bytes(lane.nbytes),
                duration(lane.busy_ns),
                rate(lane.bytes_per_s),
                rate(lane.link_bytes_per_s),
                percent(share),
                format_bytes(lane.queue_nbytes),
            )
        )
    return ("lane", "copies", "moved", "busy", "rate", "link", "of link", "queue"), rows


def _peaks(step: StepStats) -> _Table:
    rows: list[tuple[str, ...]] = []
    for peak in step.peaks:
        if not peak.used_nbytes:
            continue
        free = None if peak.budget_nbytes is None else peak.budget_nbytes - peak.used_nbytes
        shown = [peak.saved_nbytes, peak.predicted_nbytes, peak.measured_nbytes, peak.budget_nbytes, free]
        rows.append((peak.tier.value, *("–" if nbytes is None else format_bytes(nbytes) for nbytes in shown)))
    return ("peak", "saved", "plan", "all", "budget", "free"), rows


def _stalls(step: StepStats) -> _Table:
    return ("stall", "count", "total", "longest"), [
        (stall.cause.value, f"{stall.count:,}", duration(stall.total_ns), duration(stall.longest_ns))
        for stall in step.stalls
    ]


def _layers(step: StepStats) -> _Table:
    return ("worst layers", "stalls", "recompute", "moved"), [
        (
            printable(cost.layer) or "unnamed",
            duration(cost.stall_ns),
            duration(cost.recompute_ns),
            format_bytes(cost.moved_nbytes),
        )
        for cost in step.worst_layers
    ]


def print_diff(a: str, b: str, rows: Sequence[DiffRow]) -> None:
    """Prints the figures of two runs side by side."""
    print(f"a: {printable(a)}\nb: {printable(b)}")
    print(text_table(("", "a", "b", "change", ""), [tuple(row.cells.values()) for row in rows], left=(0, 4)))
