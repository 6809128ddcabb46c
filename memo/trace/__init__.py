"""Traces of memo's events: files, statistics, verdicts, pictures. Imports no torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memo.lazy import attach

if TYPE_CHECKING:
    from memo.trace.address_plan_view import address_plan_drawings as address_plan_drawings
    from memo.trace.chrome import chrome_trace as chrome_trace
    from memo.trace.device_memory import (
        OWNED as OWNED,
        TRANSIENT as TRANSIENT,
        Holder as Holder,
        device_memory as device_memory,
    )
    from memo.trace.diff import DiffRow as DiffRow, compare_reports as compare_reports, diff_to_json as diff_to_json
    from memo.trace.figures import StepStats as StepStats
    from memo.trace.format import duration as duration, percent as percent, printable as printable, rate as rate
    from memo.trace.html import render_page as render_page
    from memo.trace.html_data import page_data as page_data
    from memo.trace.memory_snapshot import held_in_snapshot as held_in_snapshot, read_snapshot as read_snapshot
    from memo.trace.out_of_memory import (
        SAVED as SAVED,
        Answer as Answer,
        HeldMemory as HeldMemory,
        explain_memory as explain_memory,
        held_in_trace as held_in_trace,
        parse_torch_error as parse_torch_error,
    )
    from memo.trace.png import draw_step as draw_step
    from memo.trace.reader import Trace as Trace, read_traces as read_traces
    from memo.trace.recorder import TraceRecorder as TraceRecorder
    from memo.trace.report import RankReport as RankReport, Report as Report, build_report as build_report
else:
    __getattr__, __dir__, __all__ = attach(
        __name__,
        {
            "address_plan_view": "address_plan_drawings",
            "chrome": "chrome_trace",
            "device_memory": "OWNED TRANSIENT Holder device_memory",
            "diff": "DiffRow compare_reports diff_to_json",
            "figures": "StepStats",
            "format": "duration percent printable rate",
            "html": "render_page",
            "html_data": "page_data",
            "memory_snapshot": "held_in_snapshot read_snapshot",
            "out_of_memory": "SAVED Answer HeldMemory explain_memory held_in_trace parse_torch_error",
            "png": "draw_step",
            "reader": "Trace read_traces",
            "recorder": "TraceRecorder",
            "report": "RankReport Report build_report",
        },
    )
