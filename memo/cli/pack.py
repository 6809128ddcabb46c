"""`memo pack`: assigns addresses to buffers with lifetimes, in the smallest arena.

Reads a CSV (id,lower,upper,size) or a JSON problem, writes a plan that the independent checker has passed, and reports how
much PyTorch's caching allocator would reserve for the same requests. Progress goes to stderr when that is a terminal. Limits
on the size of input files are those of `memo.mip.address` (FAULTS row 18).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated, Any

from memo.allocator import CachingUse, Segments, simulate_caching, trace_of
from memo.cli.inputs.flag_types import Flag, Force, Json, OutputFile, WrittenFile
from memo.cli.tables.address import arena_table, plan_summary
from memo.cli.terminal.file_kinds import FileKind, kind_of, require_kind
from memo.cli.terminal.output_files import display_name, refuse_existing
from memo.cli.terminal.progress import WaitingLine
from memo.errors import ExitCode, UsageError
from memo.mip import STDIN
from memo.mip.address import (
    DEVICE,
    AddressPlan,
    AddressProblem,
    Buffer,
    Method,
    Progress,
    plan_to_csv,
    plan_to_json,
    read_problem,
    solve,
    write_file,
)
from memo.out_of_memory import blocks_apart
from memo.trace import address_plan_drawings, render_page
from memo.units import format_bytes, parse_bytes, parse_duration_s, text_table

if TYPE_CHECKING:
    from memo.out_of_memory import SnapshotBlocks


def _share(text: str) -> float:
    try:
        share = float(text.removesuffix("%")) / 100
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise UsageError(f"{text!r} is not a percentage from 0% to 100%; write for instance 1%")
    return share


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Options of `memo pack`."""

    problem: Annotated[str, Flag(flags="problem", metavar=None, nargs="?")] = STDIN
    """Buffers with lifetimes: CSV with the columns id,lower,upper,size, or JSON; or a snapshot of torch's CUDA memory
    (default: standard input, also -)."""
    capacity: Annotated[Sequence[str], Flag(type=str, action="append", metavar="[ARENA=]SIZE")] = ()
    """Largest allowed arena size, such as 80GiB; name the arena where there are several, and repeat the option (default: the
    problem's, else no limit)."""
    align: Annotated[int | None, Flag(type=functools.partial(parse_bytes, bare=True), metavar="SIZE")] = None
    """Every offset is a multiple of SIZE bytes, such as 512 (default: the problem's)."""
    time_limit: Annotated[float, Flag(type=parse_duration_s, metavar="DURATION")] = 60.0
    """Time for all: reading, the simulated caching allocator, planning and the check of the plan, such as 500ms or 5m
    (default 60s)."""
    gap: Annotated[float, Flag(type=_share, metavar="PERCENT")] = 0.0
    """Stop when an arena is within PERCENT of the lower bound, such as 1% (default 0%)."""
    method: Method = Method.AUTO
    """Solver: search (greedy fits, local search, branch and bound), mip (mixed-integer program by HiGHS), or auto
    (search, and mixed-integer programs for buffers in groups)."""
    seed: int = 0
    """Random seed of the search; same seed, same plan where the time limit is not reached."""
    output: OutputFile | None = None
    """Write the plan: CSV if FILE ends in .csv, else JSON."""
    force: Force = False
    json: Json = False
    plot: WrittenFile | None = None
    """Draw the address layout as a page; FILE ends in .html."""


def run(args: Options) -> ExitCode:
    """Solves the problem, checks and writes the plan, and prints it."""
    end = monotonic() + args.time_limit
    refuse_existing(args.output, args.plot, force=args.force)
    if args.plot and not args.plot.endswith(".html"):
        raise UsageError(f"--plot {args.plot!r}: the name must end in .html")
    if args.problem == STDIN and sys.stdin.isatty():
        raise UsageError("no input; name a file with buffers, or pipe one in: memo record ... | memo pack")
    require_kind(args.problem, FileKind.BUFFERS, FileKind.ADDRESS_PLAN, FileKind.SNAPSHOT)
    reserved: int | None = None
    with WaitingLine("memo pack", "reading the buffers", quiet=args.json) as waiting:
        if kind_of(args.problem) is FileKind.SNAPSHOT:
            snapshot = blocks_apart(Path(args.problem))
            reserved, caching = snapshot.reserved_nbytes, []
            problem = _with_options(_of_snapshot(snapshot), args)
        else:
            given = read_problem(args.problem)
            problem = _with_options(given, args)
            waiting.say("simulating a caching allocator")
            caching = _caching(given)
        waiting.say(f"packing {len(problem.buffers):,} buffers; the first time, the solver is compiled")
        plan = solve(
            problem,
            time_limit_s=max(end - monotonic(), 0.0),
            gap=args.gap,
            method=args.method,
            seed=args.seed,
            progress=lambda progress: waiting.say(_words(progress)),
            known={f"PyTorch's {use.segments} segments": use.addresses for use in caching},
        )
    if args.output:
        text = plan_to_csv(plan) if args.output.endswith(".csv") else plan_to_json(plan)
        write_file(args.output, text, overwrite=args.force)
    if args.plot:
        drawings = {"plans": address_plan_drawings(plan, title=Path(args.problem).name)}
        write_file(args.plot, render_page(drawings, title="memo pack"), overwrite=args.force)
    if args.json:
        figures = [_caching_figures(use) for use in caching]
        there = {} if reserved is None else {"reserved_nbytes": reserved}
        print(json.dumps({**plan_summary(plan), **there, "caching": figures, "output": args.output, "plot": args.plot}))
        return ExitCode.OK
    if reserved is not None:
        needed = format_bytes(plan.arena(DEVICE).nbytes, up=True)
        print(f"torch reserves {format_bytes(reserved)}, an arena needs {needed}\n")
    print(arena_table(plan))
    if caching:
        print(f"\n{_caching_table(plan, caching)}")
    for path in filter(None, (args.output, args.plot)):
        print(f"Wrote {display_name(path)}")
    return ExitCode.OK


def _of_snapshot(snapshot: SnapshotBlocks) -> AddressProblem:
    return AddressProblem(
        buffers=tuple(
            Buffer(id=f"block{number}", start=start, end=end, nbytes=nbytes)
            for number, (start, end, nbytes) in enumerate(snapshot.blocks)
        )
    )


def _caching(problem: AddressProblem) -> list[CachingUse]:
    """Simulated memory use of PyTorch's caching allocator for the device's buffers; empty without device buffers."""
    kept = problem.of(DEVICE)
    if not kept:
        return []
    trace = trace_of(AddressProblem(buffers=kept))
    return [simulate_caching(trace, segments) for segments in Segments]


def _caching_figures(use: CachingUse) -> dict[str, Any]:
    figures = dataclasses.asdict(use)
    del figures["addresses"]  # one for each buffer: too many to print
    return {**figures, "segments": use.segments.value}


def _caching_table(plan: AddressPlan, caching: Sequence[CachingUse]) -> str:
    arena = plan.arena(DEVICE).nbytes
    rows = [
        (
            f"PyTorch, {use.segments} segments",
            format_bytes(use.reserved_nbytes),
            f"{use.reserved_nbytes / arena - 1:+.2%}" if arena else "-",
            f"{use.driver_calls:,}",
        )
        for use in caching
    ]
    header = ("a caching allocator, simulated", "reserves", "against the arena", "driver calls")
    return text_table(header, rows)


def _with_options(problem: AddressProblem, args: Options) -> AddressProblem:
    alignment = problem.alignment if args.align is None else args.align
    if alignment < 1:
        raise UsageError("--align must be at least 1")
    capacities = dict(problem.capacities)
    for text in args.capacity:
        arena, named, size = text.rpartition("=")
        if not named:
            if len(problem.arenas) > 1:
                raise UsageError(f"--capacity {text}: name the arena, {' or '.join(map(repr, problem.arenas))}")
            arena = next(iter(problem.arenas), "device")
        elif arena not in problem.arenas:
            raise UsageError(f"--capacity {text}: no buffer is in arena {arena!r}")
        capacities[arena] = parse_bytes(size, what="--capacity", bare=True)
    return dataclasses.replace(problem, alignment=alignment, capacities=capacities)


def _words(progress: Progress) -> str:
    """Words of the waiting line: the best plan so far."""
    best = "no plan yet"
    if progress.nbytes is not None:
        above = progress.nbytes / progress.lower_bound_nbytes - 1 if progress.lower_bound_nbytes else 0.0
        best = f"{format_bytes(progress.nbytes)}, {above:.2%} above"
    return f"{progress.arena!r}: {best}, bound {format_bytes(progress.lower_bound_nbytes)}"
