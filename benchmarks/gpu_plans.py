"""Plans and alphas on a GPU, against every fixed way, in one run: what was predicted, what was measured, who is fastest.

    python3 -m benchmarks.gpu_bench plan     350m at 8k, 32k, 128k and 256k tokens: the automatic plan
    python3 -m benchmarks.gpu_bench alpha    350m at 128k tokens: alpha from 0 to 1 and checkpointing; table and plot

The automatic plan gets a device budget that keeping everything does not fit: where that ran, half of what it took.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

import memo
from benchmarks.comparison import Setup, compare, guarded, now, release_memory, train_step
from benchmarks.machine import no_solver
from benchmarks.peers.ways import CHECKPOINTING, KEEP, Compute, Way, managed, memo_way
from memo.units import format_bytes

if TYPE_CHECKING:
    from benchmarks.table import Table
    from memo.gpt.config import GPTConfig

ALPHAS = (0.0, 0.25, 0.5, 0.75, 1.0)
MOST_STEPS = 14
"""Steps until the automatic plan is settled: three to measure, two for each of its corrections."""

Written = Callable[[dict[str, Any]], Any]


def at_alphas(values: Iterable[float], host: str, *, device: int | None = None) -> list[Way]:
    """memo at fixed alphas, host tier only; `device` bytes say how far ahead is reloaded."""
    return [
        memo_way(
            f"memo, alpha {alpha:g}",
            Compute.ONCE if alpha == 1 else Compute.OTHER,
            alpha=alpha,
            host=host,
            device=device,
            disk=[],
        )
        for alpha in values
    ]


def automatic(setup: Setup, config: GPTConfig, device_bytes: int | None, host: str) -> dict[str, Any]:
    """Trains under the automatic plan; its predictions and the measurements of the steps after it was settled."""
    if (lacking := no_solver()) is not None:
        return {"failed": lacking}
    found = guarded(lambda: _automatic(setup, config, device_bytes, host))
    release_memory()
    return {"failed": found} if isinstance(found, str) else found


def _automatic(setup: Setup, config: GPTConfig, device_bytes: int | None, host: str) -> dict[str, Any]:
    held = torch.cuda.memory_allocated(setup.device) if setup.device.type == "cuda" else 0  # by the fixed ways' model
    model, ids = setup.make(config)
    budget = None if device_bytes is None else device_bytes + held
    manager = memo.offload(model, device=budget, host=host, disk=[])
    running = managed(manager)
    try:
        for _ in range(MOST_STEPS):
            train_step(model, ids, running)
        stats, steps, peaks = manager.stats, [], []
        stats.restart_peak()
        waited, moved = stats.stall_s, running.moved()
        for _ in range(setup.rounds):
            steps.append(train_step(model, ids, running))
            peaks.append(stats.restart_peak())
        report, plan = manager.report(), manager.plan
    finally:
        manager.close()
    if plan is None:
        return {"failed": "; ".join(report.plan.lines()) if report.plan else "no plan"}
    predicted, seconds = plan.stages[0], statistics.median(step.seconds for step in steps)
    return {
        "declined": plan.declined,
        "step_s": seconds,
        "predicted_s": predicted.microbatch_s,
        "step_off": seconds / predicted.microbatch_s - 1,
        "moved": dataclasses.asdict(running.moved().since(moved).shared(setup.rounds)),
        "peak_device_bytes": max(step.peak_bytes for step in steps) - held,
        "peak_bytes": max(peaks),
        "predicted_peak_bytes": predicted.peak_device_bytes,
        "stall_s": (stats.stall_s - waited) / setup.rounds,
        "predicted_stall_s": predicted.stall_s,
        "lines": report.plan.lines() if report.plan else [],
    }


def plans(
    setup: Setup, configs: Iterable[GPTConfig], ways: Sequence[Way], host: str, *, written: Written
) -> list[dict[str, Any]]:
    """The automatic plan at each length beside fixed ways; what there is so far goes to `written` after each row.

    It is measured behind keeping everything, which gives it its budget, and before the ways that may take long.
    """
    cases: list[dict[str, Any]] = []
    for config in configs:
        ours: dict[str, Any] = {}

        def plan(budget: int | None, table: Table, config: GPTConfig = config, ours: dict[str, Any] = ours) -> None:
            ours |= {"device_budget": budget, "plan": {"at": now(), **automatic(setup, config, budget, host)}}
            _print_plan(ours["plan"], budget, table.step_of(KEEP), table.step_of(CHECKPOINTING))

        def so_far(table: Table, plan: Callable[..., None] = plan, ours: dict[str, Any] = ours) -> None:
            row = table.rows[-1]
            if row.way == KEEP and row.step_s is not None:
                plan(row.peak_device_bytes // 2, table)
            written({"cases": [*cases, table.body() | ours]})

        table = compare(setup, config, ways, so_far)
        if not ours:
            plan(None, table)
        cases.append(table.body() | ours)
        written({"cases": cases})
    return cases


def _print_plan(ours: dict[str, Any], budget: int | None, keep_s: float | None, checkpointing_s: float | None) -> None:
    name = f"memo, automatic, {'all memory' if budget is None else format_bytes(budget)}"
    if "failed" in ours:
        print(f"  {name:24} {ours['failed']}", flush=True)
        return
    seconds = ours["step_s"]
    ratios = [
        f"{seconds / step_s:.2f} of {way}'s"
        for way, step_s in ((KEEP, keep_s), (CHECKPOINTING, checkpointing_s))
        if step_s
    ]
    print(f"  {name:24} {seconds * 1e3:.1f} ms ({ours['step_off']:+.1%} of the prediction; {', '.join(ratios)})")
    print(
        f"    device {format_bytes(ours['peak_device_bytes'])}, saved tensors at most {format_bytes(ours['peak_bytes'])} "
        f"({format_bytes(ours['predicted_peak_bytes'])} predicted)"
    )
    print("".join(f"    {line}\n" for line in ours["lines"]), end="", flush=True)


def alphas(
    setup: Setup, config: GPTConfig, ways: Sequence[Way], *, written: Callable[[dict[str, Any]], Path]
) -> dict[str, Any]:
    """Step time over alpha beside fixed ways, as a table and a plot."""
    table = compare(setup, config, ways, lambda table: written(table.body()))
    steps = {alpha: table.step_of(f"memo, alpha {alpha:g}") for alpha in ALPHAS}
    title = f"{setup.model}, {config.max_seq} tokens"
    plot = written(table.body()).with_suffix(".png")
    drawn = _plot(steps, table.step_of(CHECKPOINTING), title, plot)
    print(f"Wrote {plot}" if drawn else "no plot: matplotlib is not installed")
    return table.body()


def _plot(steps: dict[float, float | None], checkpointing: float | None, title: str, path: Path) -> bool:
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return False
    known = {alpha: step for alpha, step in steps.items() if step is not None}
    figure, axes = pyplot.subplots(figsize=(6, 4))
    axes.plot(list(known), list(known.values()), marker="o", label="memo")
    if checkpointing is not None:
        axes.axhline(checkpointing, linestyle="--", color="grey", label="full checkpointing")
    axes.set(xlabel="alpha: largest fraction that moves", ylabel="step time (s)", title=title, ylim=(0, None))
    axes.legend()
    figure.savefig(path, dpi=150)
    return True


if __name__ == "__main__":
    from benchmarks.gpu_bench import main

    sys.exit(main(sys.argv[1:]))
