"""Traces of memo's events: files, statistics, verdicts, pictures. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memo.lazy import attach

if TYPE_CHECKING:
    from memo.trace.address_plan_view import address_plan_drawings as address_plan_drawings
    from memo.trace.chrome import chrome_trace as chrome_trace
    from memo.trace.device_memory import (
        OTHER as OTHER,
        OWNED as OWNED,
        TRANSIENT as TRANSIENT,
        Holder as Holder,
        device_stack as device_stack,
        largest_holders as largest_holders,
    )
    from memo.trace.diff import (
        DiffRow as DiffRow,
        compare_reports as compare_reports,
        diff_page as diff_page,
        diff_sentence as diff_sentence,
        diff_to_json as diff_to_json,
    )
    from memo.trace.figures import StepStats as StepStats
    from memo.trace.format import duration as duration, percent as percent, printable as printable, rate as rate
    from memo.trace.html import render_page as render_page
    from memo.trace.html_data import page_data as page_data
    from memo.trace.reader import Trace as Trace, read_traces as read_traces
    from memo.trace.recorder import TraceRecorder as TraceRecorder, trace_path as trace_path
    from memo.trace.report import RankReport as RankReport, TraceReport as TraceReport, build_report as build_report
    from memo.trace.stats import COPY_LANES as COPY_LANES
    from memo.trace.tensor_lifetimes import residency_changes as residency_changes
else:
    __getattr__, __dir__, __all__ = attach(__name__)
