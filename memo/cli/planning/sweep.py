"""`memo plan --sweep`: plans over a range of sequence lengths, or of budgets of device or host, as a table and a plot."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from memo.atomic_file import atomic_file
from memo.cli.tables.activation import added, step_time, utilisation
from memo.cli.terminal.output_files import print_written
from memo.cli.terminal.progress import WaitingLine
from memo.errors import ExitCode, Infeasible, MemoError, UsageError
from memo.mip.activation import (
    LayerPlan,
    device_peak_candidates,
    predict_stages,
)
from memo.mip.inputs import MATMULS, free_swap_tokens
from memo.mip.simulate import verify_by_simulation
from memo.search import Shares
from memo.units import format_bytes, format_tokens, text_table

if TYPE_CHECKING:
    from memo.search import Request

SweepAxis = Literal["seq", "device", "host"]

SHORTEST_TOKENS = 8 << 10
BUDGET_POINTS = 12
GIB, TIB = 1 << 30, 1 << 40
CLOSE = 1.25
"""Ratio of two lengths below which the smaller one has no label on the axis."""
PLOTS = (".png", ".svg", ".pdf")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """Predicted figures of one plan."""

    declined: bool
    step_s: float
    tokens_per_s: float
    mfu_causal: float
    added: float
    """Time of recompute, MLPs in tiles, coding and stalls, as a share of the computation without them."""
    peak_device_bytes: int
    peak_host_bytes: int
    peak_disk_bytes: int
    shares: Shares


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SweepPoint:
    """One problem of a sweep and its result: a fit, or the reason why nothing fits."""

    tokens: int
    device_budget_bytes: int
    host_budget_bytes: int
    """Host memory of one node."""
    infeasible: str | None = None
    fit: Fit | None = None

    @classmethod
    def of(cls, request: Request) -> SweepPoint:
        """Plans, checks and simulates one request."""
        budgets = request.budgets
        here = functools.partial(
            cls,
            tokens=request.layout.tokens,
            device_budget_bytes=budgets.device_bytes,
            host_budget_bytes=budgets.host_bytes,
        )
        try:
            plan = request.plan()
        except Infeasible as error:
            return here(infeasible=str(error))
        verify_by_simulation(plan)
        figures = utilisation(plan)
        fit = Fit(
            declined=plan.declined is not None,
            step_s=plan.step_s,
            tokens_per_s=figures["tokens_per_s"],
            mfu_causal=figures["mfu_causal"],
            added=added(plan),
            peak_device_bytes=max(stage.peak_device_bytes for stage in plan.stages),
            peak_host_bytes=max(stage.peak_host_bytes for stage in plan.stages),
            peak_disk_bytes=max(stage.peak_disk_bytes for stage in plan.stages),
            shares=Shares.of(plan),
        )
        return here(fit=fit)


def run_sweep(request: Request, args: argparse.Namespace) -> ExitCode:
    """Runs the sweep and prints its table; exit code 3 where no point fits."""
    if args.plot is not None and not args.plot.endswith(PLOTS):
        raise UsageError(f"--plot {args.plot!r}: the name must end in {', '.join(PLOTS)}")
    if args.output is not None:
        raise UsageError("-o writes one plan, and a sweep makes many; leave out -o or --sweep")
    requests = {"seq": _lengths, "device": _devices, "host": _hosts}[args.sweep](request)
    with WaitingLine("memo plan", f"sweeping over {len(requests)} plans", quiet=args.json):
        points = [SweepPoint.of(one) for one in requests]
    length = free_swap_tokens(request.problem().profile, request.machine, ranks_per_node=request.budgets.ranks_per_node)
    if args.plot is not None:
        with atomic_file(Path(args.plot), overwrite=args.force) as sibling:
            _draw(points, sibling, by=args.sweep, crossover=length)
    if args.json:
        found = [dataclasses.asdict(point) for point in points]
        print(json.dumps({"sweep": args.sweep, "points": found, "full_swap_is_free_from_tokens": length}))
    else:
        print(_table(points, by=args.sweep))
        if length is not None:
            print(f"\nfull swap hides behind compute from {length:,} tokens")
        if args.plot is not None:
            print_written(args.plot)
    return ExitCode.INFEASIBLE if all(point.infeasible for point in points) else ExitCode.OK


def _lengths(request: Request) -> list[Request]:
    """Requests with the sequence length doubled from 8k up to the one of the request."""
    if request.config is None:
        raise UsageError("--sweep seq needs --model; a measured profile has one sequence length")
    longest = request.layout.tokens
    lengths = [SHORTEST_TOKENS << power for power in range(40) if SHORTEST_TOKENS << power < longest] + [longest]
    return [dataclasses.replace(request, layout=dataclasses.replace(request.layout, tokens=n)) for n in lengths]


def _devices(request: Request) -> list[Request]:
    """Requests with device budgets from the smallest useful one to one that keeps everything, or to the GPU's memory."""
    problem = request.problem()
    least = max(place.resident_bytes for stage in problem.stages for place in device_peak_candidates(stage))
    most = max(
        stage.peak_device_bytes for stage in predict_stages(problem, [LayerPlan()] * len(problem.profile.layers))
    )
    least = min(least + least // 1000, most)
    there = max(request.machine.device_bytes, request.budgets.device_bytes)
    most = min(most, there) if there > least else most
    sizes = [least + (most - least) * point // (BUDGET_POINTS - 1) for point in range(BUDGET_POINTS)]
    return [dataclasses.replace(request, budgets=dataclasses.replace(request.budgets, device_bytes=n)) for n in sizes]


def _hosts(request: Request) -> list[Request]:
    """Requests with host budgets of a node from the least that fits to what the request's own plan takes."""
    most = request.budgets.host_bytes
    if not most:
        raise UsageError("--sweep host goes from no host memory to --host, which is 0")
    try:
        stages = request.plan().stages
    except Infeasible:
        pass
    else:
        taken = max(stage.peak_host_bytes for stage in stages) * request.budgets.ranks_per_node
        most = min(most, taken) or most
    least = _least_host_bytes(request, most)
    sizes = [least + (most - least) * point // (BUDGET_POINTS - 1) for point in range(BUDGET_POINTS)]
    return [dataclasses.replace(request, budgets=dataclasses.replace(request.budgets, host_bytes=n)) for n in sizes]


def _least_host_bytes(request: Request, most: int) -> int:
    """The least host budget that fits, to a hundredth of `most`; 0 where that fits, or nothing does."""

    def does_fit(nbytes: int) -> bool:
        budgets = dataclasses.replace(request.budgets, host_bytes=nbytes)
        return dataclasses.replace(request, budgets=budgets).fits()

    low, high = 0, most
    if does_fit(low) or not does_fit(high):
        return 0
    while high - low > most // 100:
        middle = (low + high) // 2
        low, high = (low, middle) if does_fit(middle) else (middle, high)
    return high


def _table(points: Sequence[SweepPoint], *, by: SweepAxis) -> str:
    header = (
        by,
        "step",
        "tokens/s",
        "mfu_causal",
        "added",
        "alpha",
        "matmuls",
        "kept",
        "host",
        "disk",
        "device",
        "note",
    )
    return text_table(header, [_row(point, by=by) for point in points])


def _row(point: SweepPoint, *, by: SweepAxis) -> tuple[str, ...]:
    name = format_tokens(point.tokens) if by == "seq" else format_bytes(_budget(point, by))
    fit = point.fit
    if fit is None:
        return (name, *["-"] * 10, "does not fit")
    shares = (fit.shares.alpha, fit.shares.points.get(MATMULS, 0.0), fit.shares.kept, fit.shares.host, fit.shares.disk)
    return (
        name,
        step_time(fit.step_s),
        f"{fit.tokens_per_s:,.0f}",
        f"{100 * fit.mfu_causal:.1f} %",
        f"{100 * fit.added:.2f} %",
        *(f"{100 * share:.0f} %" for share in shares),
        format_bytes(fit.peak_device_bytes),
        "nothing to move" if fit.declined else "",
    )


def _budget(point: SweepPoint, by: SweepAxis) -> int:
    return point.host_budget_bytes if by == "host" else point.device_budget_bytes


def _draw(points: Sequence[SweepPoint], path: Path, *, by: SweepAxis, crossover: int | None) -> None:
    """Draws utilisation and added time above, the shares of the bytes below."""
    try:
        from matplotlib import rcParams
        from matplotlib.figure import Figure
    except ImportError:
        raise MemoError("pictures need matplotlib: pip install matplotlib") from None
    rcParams["svg.hashsalt"] = "memo"  # the same sweep gives the same file
    answered = [(point, point.fit) for point in points if point.fit is not None]
    most = max((_budget(point, by) for point, _ in answered), default=0)
    unit, unit_name = (TIB, "TiB") if most >= 2 * TIB else (GIB, "GiB")
    where = [point.tokens if by == "seq" else _budget(point, by) / unit for point, _ in answered]
    fits = [fit for _, fit in answered]
    figure = Figure(figsize=(8, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    above.plot(where, [100 * fit.mfu_causal for fit in fits], marker="o", color="#0072b2")
    above.set_ylabel("mfu_causal, %")
    right = above.twinx()
    right.plot(where, [100 * fit.added for fit in fits], marker="s", color="#d55e00")
    right.set_ylabel("added, % of the computation", color="#d55e00")
    _stack(below, where, [fit.shares for fit in fits])
    if by == "seq":
        _length_axis(below, [point.tokens for point, _ in answered])
        if crossover is not None and where and where[0] <= crossover <= where[-1]:
            label = f"full swap is free from {format_tokens(-(-crossover // 1024) * 1024)}"
            above.axvline(crossover, color="#8a8f98", linestyle=":", label=label)
            above.legend(loc="upper left", fontsize=8)
    else:
        whose = "host budget of a node" if by == "host" else "device budget of a GPU"
        below.set_xlabel(f"{whose}, {unit_name}")
        below.set_xlim(min(where, default=0), max(where, default=1))
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def _length_axis(axes: Any, lengths: Sequence[int]) -> None:
    """Labels an axis of lengths as people write them, 128k or 1m, each length that has room."""
    axes.set_xlabel("tokens of a sequence")
    axes.set_xscale("log", base=2)
    told = [now for now, then in zip(lengths, (*lengths[1:], None), strict=True) if then is None or then / now >= CLOSE]
    axes.set_xticks(told, [format_tokens(tokens) for tokens in told])
    axes.set_xticks([], minor=True)
    axes.set_xlim(min(lengths, default=1), max(lengths, default=2))


def _stack(axes: Any, where: Sequence[float], shares: Sequence[Shares]) -> None:
    parts = {
        "kept": ([share.kept for share in shares], "#0072b2"),
        "host": ([share.host for share in shares], "#009e73"),
        "disk": ([share.disk for share in shares], "#b07d12"),
        "recomputed": ([max(1.0 - share.kept - share.host - share.disk, 0.0) for share in shares], "#cc79a7"),
    }
    axes.stackplot(
        where,
        *([100 * part for part in heights] for heights, _ in parts.values()),
        labels=list(parts),
        colors=[colour for _, colour in parts.values()],
    )
    axes.set_ylabel("of what autograd saves, %")
    axes.legend(loc="center left", fontsize=8)
