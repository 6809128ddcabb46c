"""`memo trace stats|html|diff|chrome`: reports a run's trace on the terminal or as a file."""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

from memo.atomic_file import atomic_file
from memo.cli.inputs.fields import add_fields, parsed
from memo.cli.inputs.flag_types import Flag, Force, Json
from memo.cli.tables.trace import print_diff, print_stats
from memo.cli.terminal.file_kinds import FileKind, require_kind
from memo.cli.terminal.output_files import (
    file_path,
    print_written,
    refuse_existing,
)
from memo.errors import ExitCode, UsageError
from memo.trace import Trace, TraceReport, build_report, compare_reports, diff_to_json, printable, read_traces


def _step_range(text: str) -> range:
    found = re.fullmatch(r"(\d{1,18})(?:-(\d{1,18}))?", text, re.ASCII)
    if found is None:
        raise UsageError(f"{printable(text)}: not a range of steps; write for instance 10-12 or 7")
    first, last = int(found[1]), int(found[2] or found[1])
    if last < first:
        raise UsageError(f"{text}: the last step is before the first")
    return range(first, last + 1)


_Output = Annotated[Path, Flag(flags="-o --output", type=file_path)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Steps:
    """Part of a trace that is read. The fields are flags, here and below."""

    steps: Annotated[range | None, Flag(type=_step_range, metavar="FIRST-LAST")] = None
    """Read only these steps, such as 10-12 or 7 (default: all steps)."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Run(_Steps):
    """Traces of one run."""

    traces: Annotated[Sequence[str], Flag(flags="traces", type=str, nargs="+", metavar="trace.rank*.jsonl")]
    """Trace files of one run, one per rank; also .gz."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Report(_Run):
    """Traces, and what their verdict compares with."""

    plain: Annotated[float | None, Flag(metavar="SECONDS")] = None
    """Measured time of the same step without memo, which the verdict compares with (default: that of plain steps in the
    trace, if there are any)."""

    def __post_init__(self) -> None:
        if self.plain is not None and not 0 < self.plain < math.inf:
            raise UsageError(f"--plain {self.plain} is not a positive number of seconds")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Stats(_Report):
    """Options of `memo trace stats`."""

    rank: int | None = None
    """Rank to show (default: the rank with the slowest median step)."""
    step: Annotated[str | None, Flag(metavar="N")] = None
    """Number of the step to show, or all (default: the rank's median step)."""
    json: Annotated[Json, Flag(help="print one JSON object with every rank and step instead of tables")] = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Html(_Report):
    """Options of `memo trace html`."""

    output: Annotated[_Output, Flag(required=True)]
    """Write the page to FILE."""
    force: Force = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Chrome(_Run):
    """Options of `memo trace chrome`."""

    output: Annotated[_Output, Flag(required=True)]
    """Write the JSON to FILE, compressed if FILE ends in .gz."""
    force: Force = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Diff(_Steps):
    """Options of `memo trace diff`."""

    a: Annotated[str, Flag(flags="a", metavar=None)]
    """Trace file of the first run."""
    b: Annotated[str, Flag(flags="b", metavar=None)]
    """Trace file of the second run."""
    json: Annotated[Json, Flag(help="print one JSON object with every figure instead of a table")] = False
    output: _Output | None = None
    """Write a page with both steps, one below the other."""
    force: Force = False


def configure(parser: argparse.ArgumentParser) -> None:
    """Adds the subcommands of `memo trace` with their arguments."""
    commands = parser.add_subparsers(
        title="commands", dest="trace_command", metavar="stats|html|diff|chrome", required=True
    )
    for name, (text, options, _) in _COMMANDS.items():
        add_fields(commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}."), options)


def run(args: argparse.Namespace) -> int:
    """Runs the subcommand and returns its exit code."""
    _, options, act = _COMMANDS[args.trace_command]
    return act(parsed(options, args))


def _read(args: _Run) -> list[Trace]:
    for path in args.traces:
        require_kind(path, FileKind.TRACE)
    traces = read_traces(args.traces, steps=args.steps)
    if args.steps is not None and not any(trace.events for trace in traces):
        raise UsageError("--steps: the trace has no event of these steps; choose others")
    return traces


def _stats(args: _Stats) -> int:
    report = build_report(_read(args), plain_s=args.plain)
    rank, step = _selected(report, args)
    if args.json:
        print(json.dumps(report.to_json(), allow_nan=False))
        return ExitCode.OK
    one = report.of_rank(rank)
    print_stats(one, one.step(step))
    return ExitCode.OK


def _html(args: _Html) -> int:
    from memo.trace import page_data, render_page

    refuse_existing(args.output, force=args.force)
    report = build_report(_read(args), plain_s=args.plain)
    data = page_data(report)
    model = report.of_rank(report.rank).trace.meta.get("model")
    title = f"memo trace: {printable(model)}" if isinstance(model, str) else "memo trace"
    with atomic_file(args.output, overwrite=args.force) as target:
        target.write_text(render_page(data, title=title), encoding="utf-8")
    for rank in data["ranks"]:
        if rank["thinned"]:
            print(rank["thinned"])
    print_written(args.output)
    return ExitCode.OK


def _chrome(args: _Chrome) -> int:
    from memo.trace import chrome_trace

    refuse_existing(args.output, force=args.force)
    text = json.dumps(chrome_trace(_read(args)), allow_nan=False, separators=(",", ":")).encode("ascii")
    packed = args.output.suffix == ".gz"
    with atomic_file(args.output, overwrite=args.force) as target:
        target.write_bytes(gzip.compress(text, mtime=0) if packed else text)
    print_written(args.output)
    return ExitCode.OK


def _diff(args: _Diff) -> int:
    from memo.trace import diff_page, diff_sentence, render_page

    for path in (args.a, args.b):
        require_kind(path, FileKind.TRACE)
    if args.output is not None and args.json:
        raise UsageError("-o writes a page and --json prints figures; give one of them")
    refuse_existing(args.output, force=args.force)
    a, b = (build_report(read_traces([path], steps=args.steps)) for path in (args.a, args.b))
    rows = compare_reports(a, b)
    if args.json:
        print(json.dumps({"format": "memo-trace-diff", "version": 1, "figures": diff_to_json(rows)}, allow_nan=False))
        return ExitCode.OK
    if args.output is not None:
        page = diff_page(a, b, rows, names=(args.a, args.b))
        with atomic_file(args.output, overwrite=args.force) as target:
            target.write_text(render_page(page, title="memo trace diff"), encoding="utf-8")
        print_written(args.output)
        return ExitCode.OK
    print(diff_sentence(rows))
    print_diff(args.a, args.b, rows)
    return ExitCode.OK


def _selected(report: TraceReport, args: _Stats) -> tuple[int, int | None]:
    """Rank and step of the arguments, by default those that represent the run; None is all steps."""
    rank = report.rank if args.rank is None else args.rank
    one = report.of_rank(rank)
    if args.step == "all":
        return rank, None
    if args.step is not None:
        if not args.step.isdecimal():
            raise UsageError(f"--step {printable(args.step)}: not a step; give a number, or all")
        return rank, one.step(int(args.step)).step
    known = [step.step for step in one.stats.steps]
    return rank, report.step if report.step in known else None


_COMMANDS: dict[str, tuple[str, type, Callable[[Any], int]]] = {
    "stats": ("print the figures and the verdict of a run", _Stats, _stats),
    "html": ("write the timeline of a run as one HTML page", _Html, _html),
    "chrome": ("write JSON for Perfetto and chrome://tracing", _Chrome, _chrome),
    "diff": ("compare two runs side by side", _Diff, _diff),
}
"""Text, options and function of each subcommand."""
