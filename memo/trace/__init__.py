"""Trace events, their files, statistics and pictures. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memo.lazy import attach

if TYPE_CHECKING:
    from memo.trace.address_plan_view import packing_of as packing_of
    from memo.trace.chrome import chrome_trace as chrome_trace
    from memo.trace.diff import Row as Row, compare_reports as compare_reports, diff_to_json as diff_to_json
    from memo.trace.figures import StepStats as StepStats
    from memo.trace.format import duration as duration, percent as percent, printable as printable, rate as rate
    from memo.trace.html import render_page as render_page
    from memo.trace.html_data import page_data as page_data
    from memo.trace.png import draw as draw
    from memo.trace.reader import Trace as Trace, read_traces as read_traces
    from memo.trace.recorder import TraceRecorder as TraceRecorder
    from memo.trace.report import RankReport as RankReport, Report as Report, report_on as report_on
else:
    __getattr__, __dir__, __all__ = attach(
        __name__,
        {
            "address_plan_view": "packing_of",
            "chrome": "chrome_trace",
            "diff": "Row compare_reports diff_to_json",
            "figures": "StepStats",
            "format": "duration percent printable rate",
            "html": "render_page",
            "html_data": "page_data",
            "png": "draw",
            "reader": "Trace read_traces",
            "recorder": "TraceRecorder",
            "report": "RankReport Report report_on",
        },
    )
