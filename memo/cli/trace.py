"""`memo trace stats|html|diff|chrome|png`: what a run's trace says, on the terminal and as files.

`memo.cli.output_files` writes the files.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from memo.cli.output_files import file_path, refuse_existing, replacing, say_written
from memo.cli.trace_tables import print_diff, print_stats
from memo.errors import ExitCode, UsageError
from memo.trace import Report, Trace, build_report, compare_reports, diff_to_json, printable, read_traces

__all__ = ["configure", "run"]


def configure(parser: argparse.ArgumentParser) -> None:
    commands = parser.add_subparsers(dest="trace_command", metavar="stats|html|diff|chrome|png", required=True)
    stats = _command(commands, "stats", "figures and verdict of a run", _stats)
    _choice(stats)
    stats.add_argument("--json", action="store_true", help="one object, every rank and step")
    html = _command(commands, "html", "one self-contained page with every byte and millisecond", _html)
    html.add_argument("--plan", type=Path, metavar="FILE", help="an address plan to show as a packing picture")
    _output(html)
    chrome = _command(commands, "chrome", "Chrome-trace JSON for Perfetto and chrome://tracing", _chrome)
    _output(chrome)
    png = _command(commands, "png", "the picture of one step (.png, .pdf or .svg)", _png)
    _choice(png)
    _output(png)
    two = commands.add_parser("diff", help="two runs side by side", description="Two runs side by side.")
    two.add_argument("a", help="trace file of the first run")
    two.add_argument("b", help="trace file of the second run")
    two.add_argument("--json", action="store_true", help="one object, every figure")
    _only(two)
    two.set_defaults(act=_diff)


def run(args: argparse.Namespace) -> int:
    act: Callable[[argparse.Namespace], int] = args.act
    return act(args)


def _command(commands: Any, name: str, text: str, act: Callable[[argparse.Namespace], int]) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    parser.add_argument("traces", nargs="+", metavar="trace.rank*.jsonl", help="one file a rank, of one run; .gz too")
    _only(parser)
    parser.set_defaults(act=act)
    return parser


def _only(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", metavar="FIRST-LAST", help="read these steps alone, both included; `7` for one")


def _steps(args: argparse.Namespace) -> range | None:
    if args.steps is None:
        return None
    found = re.fullmatch(r"(\d{1,18})(?:-(\d{1,18}))?", args.steps, re.ASCII)
    if found is None:
        raise UsageError(f"--steps {printable(args.steps)}: write for instance 10-12")
    first, last = int(found[1]), int(found[2] or found[1])
    if last < first:
        raise UsageError(f"--steps {args.steps}: the last step is before the first")
    return range(first, last + 1)


def _read(args: argparse.Namespace) -> list[Trace]:
    traces = read_traces(args.traces, steps=_steps(args))
    if args.steps is not None and not any(trace.events for trace in traces):
        raise UsageError(f"--steps {args.steps}: the trace has no event of these steps")
    return traces


def _choice(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rank", type=int, help="default: the rank whose median step is slowest")
    parser.add_argument("--step", help="a step's number, or `all`; default: that rank's median step")


def _output(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", "--output", type=file_path, required=True, metavar="FILE")
    parser.add_argument("-f", "--force", action="store_true", help="overwrite an existing file")


def _stats(args: argparse.Namespace) -> int:
    report = build_report(_read(args))
    rank, step = _chosen(report, args)
    if args.json:
        print(json.dumps(report.to_json(), allow_nan=False))
        return ExitCode.OK
    one = report.of_rank(rank)
    print_stats(one, one.step(step))
    return ExitCode.OK


def _html(args: argparse.Namespace) -> int:
    from memo.trace import page_data, render_page

    refuse_existing(args.output, force=args.force)
    report = build_report(_read(args))
    data = page_data(report, packing=_packing(args.plan) if args.plan else [])
    model = report.of_rank(report.rank).trace.meta.get("model")
    title = f"memo trace: {printable(model)}" if isinstance(model, str) else "memo trace"
    with replacing(args.output, force=args.force) as target:
        target.write_text(render_page(data, title=title), encoding="utf-8")
    for rank in data["ranks"]:
        if rank["thinned"]:
            print(rank["thinned"])
    say_written(args.output)
    return ExitCode.OK


def _packing(path: Path) -> list[dict[str, Any]]:
    from memo.mip.address import read_plan
    from memo.trace import address_plan_drawings

    return address_plan_drawings(read_plan(path), title=path.name)


def _chrome(args: argparse.Namespace) -> int:
    from memo.trace import chrome_trace

    refuse_existing(args.output, force=args.force)
    text = json.dumps(chrome_trace(_read(args)), allow_nan=False, separators=(",", ":")).encode("ascii")
    packed = args.output.suffix == ".gz"
    with replacing(args.output, force=args.force) as target:
        target.write_bytes(gzip.compress(text, mtime=0) if packed else text)
    say_written(args.output)
    return ExitCode.OK


def _png(args: argparse.Namespace) -> int:
    from memo.trace import draw_step

    if args.output.suffix not in (".png", ".pdf", ".svg"):
        raise UsageError(f"-o {printable(str(args.output))}: pictures end in .png, .pdf or .svg")
    refuse_existing(args.output, force=args.force)
    report = build_report(_read(args))
    rank, step = _chosen(report, args)
    with replacing(args.output, force=args.force) as target:
        draw_step(report, target, rank=rank, step=step)
    say_written(args.output)
    return ExitCode.OK


def _diff(args: argparse.Namespace) -> int:
    reports = [build_report(read_traces([path], steps=_steps(args))) for path in (args.a, args.b)]
    rows = compare_reports(*reports)
    if args.json:
        print(json.dumps({"format": "memo-trace-diff", "version": 1, "figures": diff_to_json(rows)}, allow_nan=False))
        return ExitCode.OK
    print_diff(args.a, args.b, rows)
    return ExitCode.OK


def _chosen(report: Report, args: argparse.Namespace) -> tuple[int, int | None]:
    """The rank and step that the arguments name, or those that stand for the run."""
    rank = report.rank if args.rank is None else args.rank
    one = report.of_rank(rank)
    if args.step == "all":
        return rank, None
    if args.step is not None:
        if not args.step.isdecimal():
            raise UsageError(f"--step {printable(args.step)}: a step's number, or `all`")
        return rank, one.step(int(args.step)).step
    known = [step.step for step in one.stats.steps]
    return rank, report.step if report.step in known else None
