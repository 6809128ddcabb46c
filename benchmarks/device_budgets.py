"""Budgets of a CPU run: is there a lasting automatic plan wherever some alpha holds the budget?

    python -m benchmarks.device_budgets [--lengths 1k 1280 1536] [--shares 0.25 0.5 0.75] [--steps 20] [--disk-dir DIR]

Nine runs by default: three lengths by three device budgets. For each length a run without memo and one for each alpha of 0,
1/8 ... 1 show what they are resident with; a budget of share 0 is the least of these, one of share 1 what the run without
memo takes. An alpha holds a budget if no step after its first two went above it. The automatic run has the budget, and its
plan lasts if it is in use at the end and no step since it was settled went above. Each run is a process of its own, since
what one leaves in the heap is the next one's; resident memory is counted from where the model has been made. Of the
automatic run's, some 15 MiB are the solver's and the staging blocks of the disk that measuring has used.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.results import ROOT, write_result
from memo.units import format_bytes, parse_tokens

ALPHAS = [step / 8 for step in range(9)]
WARM_UP = 2
"""Steps of a fixed alpha that do not count: each layer's recompute is tried in the first one."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Of the model that is trained."""

    layers: int = 6
    hidden: int = 256


def run_arm(
    shape: Shape, tokens: int, *, disk_dir: str, steps: int, alpha: float | None = None, budget: int | None = None
) -> dict[str, Any]:
    """One run in a process of its own: with a budget the automatic plan, with an alpha that alone, else without memo."""
    request = {
        "shape": dataclasses.asdict(shape),
        "tokens": tokens,
        "alpha": alpha,
        "budget": budget,
        "steps": steps,
        "disk_dir": disk_dir,
    }
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.device_budgets", "--arm", json.dumps(request)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr.strip().splitlines()[-1])
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def _arm(request: dict[str, Any]) -> dict[str, Any]:
    """In the process: trains, and notes each step's peak, whoever restarts the system's count of it meanwhile."""
    import contextlib
    import warnings

    import torch

    import memo
    from memo.autoplan import device_budget
    from memo.gpt.config import preset
    from memo.gpt.model.model import GPT
    from memo.machine.process_memory import peak_rss_bytes, restart_peak_rss, return_freed_memory, rss_bytes

    torch.set_num_threads(1)
    return_freed_memory()
    peak = 0

    def restart() -> bool:
        nonlocal peak
        peak = max(peak, peak_rss_bytes())
        return restart_peak_rss()

    device_budget.restart_peak_rss = restart
    torch.manual_seed(0)
    hidden, tokens = request["shape"]["hidden"], request["tokens"]
    heads = max(1, hidden // 64)
    config = preset(
        "tiny",
        layers=request["shape"]["layers"],
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        ffn=4 * hidden,
        max_seq=tokens,
    )
    model = GPT(config)
    base = rss_bytes()
    options: dict[str, Any] = {"host": 0, "disk": request["disk_dir"]}
    manager = None
    if request["budget"] is not None:
        manager = memo.offload(model, device=base + request["budget"], **options)
    elif request["alpha"] is not None:
        manager = memo.offload(model, alpha=request["alpha"], **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    peaks, phases, told = [], [], []
    for step in range(request["steps"]):
        ids = torch.randint(0, 257, (1, tokens + 1), generator=torch.Generator().manual_seed(step))
        peak = 0
        restart_peak_rss()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with manager or contextlib.nullcontext():
                loss = model(ids[:, :-1], ids[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        del loss
        peaks.append(max(peak, peak_rss_bytes()) - base)
        told += [str(one.message) for one in caught]
        source = None if manager is None else manager._parts.source
        outcome = None if source is None else source.outcome()
        phases.append(None if outcome is None else outcome.phase)
    result: dict[str, Any] = {"peaks": peaks, "phases": phases, "told": told, "plan": None}
    if manager is not None:
        if request["budget"] is not None and manager.plan is not None:
            result["plan"] = manager.plan.declined or _described(manager.plan)
        manager.close()
    return result


def _described(plan: Any) -> str:
    alike = {(part.point, part.kept) for part in plan.layers}
    return "; ".join(f"{point}, kept {kept:.3g}" for point, kept in sorted(alike))


def lasting_rows(
    shape: Shape, lengths: Sequence[int], shares: Sequence[float], *, steps: int, disk_dir: str
) -> Iterator[dict[str, Any]]:
    """A row for each length and budget."""
    for tokens in lengths:
        plain = max(run_arm(shape, tokens, disk_dir=disk_dir, steps=WARM_UP + 1)["peaks"])
        at_alpha = {
            alpha: max(run_arm(shape, tokens, disk_dir=disk_dir, steps=WARM_UP + 1, alpha=alpha)["peaks"][WARM_UP:])
            for alpha in ALPHAS
        }
        for share in shares:
            least = min(at_alpha.values())
            budget = least + int(share * (plain - least))
            run = run_arm(shape, tokens, disk_dir=disk_dir, steps=steps, budget=budget)
            settled = next((n for n, phase in enumerate(run["phases"]) if phase == "settled"), None)
            after = [] if settled is None else run["peaks"][settled:]
            row = {
                "tokens": tokens,
                "share": share,
                "budget_bytes": budget,
                "plain_bytes": plain,
                "alpha_bytes": at_alpha,
                "alphas_that_hold": [alpha for alpha, nbytes in at_alpha.items() if nbytes <= budget],
                "plan": run["plan"],
                "settled_after": settled,
                "peak_settled_bytes": max(after, default=None),
                "most_over_bytes": max(0, max(run["peaks"]) - budget),
                "steps_over": sum(peak > budget for peak in run["peaks"]),
                "warnings": run["told"],
            }
            row["lasts"] = run["plan"] is not None and bool(after) and max(after) <= budget
            yield row


def _print(row: dict[str, Any]) -> None:
    holding = row["alphas_that_hold"]
    alphas = f"alpha {min(holding):g} to {max(holding):g} hold it" if holding else "no alpha holds it"
    settled = (
        "" if row["peak_settled_bytes"] is None else f", at most {format_bytes(row['peak_settled_bytes'])} settled"
    )
    lasts = "lasts" if row["lasts"] else "DOES NOT LAST" if holding else "none lasts"
    print(
        f"{row['tokens']} tokens, {format_bytes(row['budget_bytes'])} (share {row['share']:g}): {alphas}; "
        f"automatic plan {lasts} ({row['plan']}{settled}; {row['steps_over']} steps above the budget, at most "
        f"{format_bytes(row['most_over_bytes'])})",
        flush=True,
    )


def _write(shape: Shape, rows: list[dict[str, Any]]) -> Path:
    possible = [row for row in rows if row["alphas_that_hold"]]
    return write_result(
        "device-budgets",
        {
            **dataclasses.asdict(shape),
            "rows": rows,
            "possible": len(possible),
            "lasting": sum(row["lasts"] for row in possible),
        },
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lengths", nargs="+", type=parse_tokens, default=[1024, 1280, 1536])
    parser.add_argument("--shares", nargs="+", type=float, default=[0.25, 0.5, 0.75])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--disk-dir")
    parser.add_argument("--arm", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.arm:
        print(json.dumps(_arm(json.loads(args.arm))))
        return
    with tempfile.TemporaryDirectory(dir=args.disk_dir) as disk_dir:
        rows: list[dict[str, Any]] = []
        for row in lasting_rows(Shape(), args.lengths, args.shares, steps=args.steps, disk_dir=disk_dir):
            rows.append(row)
            _print(row)
            _write(Shape(), rows)
    possible = [row for row in rows if row["alphas_that_hold"]]
    print(
        f"{len(rows)} runs: for {len(possible)} of them some alpha holds the budget, and of these "
        f"{sum(row['lasts'] for row in possible)} have a lasting plan (goal: all)"
    )
    print(f"Wrote {_write(Shape(), rows)}")


if __name__ == "__main__":
    main()
