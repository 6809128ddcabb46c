"""Long contexts on several simulated GPUs: memo's defaults rehearsed on one rank, beside what `memo plan` predicts.

    python -m benchmarks.rehearsed_ranks [--only llama3-8b]

Each row is a training of memo's GPT in bfloat16 on nodes of 8 H100s, one sequence on all GPUs: `memo rehearse` runs the
engine, the planner and FSDP2 on a simulated rank until its plan has settled; `memo plan` gets the same budgets. A row is
written at once.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
from typing import Any

from benchmarks.results import write_result
from memo.cli.main import main as memo
from memo.rehearsal import SimulatedMachine
from memo.units import format_bytes


@dataclasses.dataclass(frozen=True)
class Case:
    """One training."""

    model: str
    tokens: str
    gpus: int
    tp: int
    cp: int
    host_memory: str
    """Free host memory of a node."""


CASES = (
    *(Case("llama3-8b", tokens, 8, 1, 8, "1TiB") for tokens in ("128k", "256k", "512k", "1m")),
    *(Case("llama3-70b", tokens, 16, 1, 16, "1TiB") for tokens in ("32k", "64k", "128k")),
    Case("7b", "1m", 8, 1, 8, "2TiB"),
    Case("13b", "1m", 16, 2, 8, "2TiB"),
    Case("30b", "1m", 32, 4, 8, "2TiB"),
    Case("65b", "1m", 64, 8, 8, "2TiB"),
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rehearsed_ranks", description=__doc__)
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose model has this text")
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for case in CASES:
        if args.only in case.model:
            rows.append(_row(case))
            print(_line(rows[-1]), flush=True)
            write_result("rehearsed-ranks", {"rows": rows})


def _row(case: Case) -> dict[str, Any]:
    shape = ["--model", case.model, "--seq", case.tokens, "--gpus", str(case.gpus), "--gpu", "h100"]
    shape += ["--tp", str(case.tp), "--cp", str(case.cp)]
    rehearsed = _json(["rehearse", *shape, "--host-memory", case.host_memory, "--json"])
    device = SimulatedMachine("h100").device_budget(None).total_bytes
    host = rehearsed["host_budget_nbytes"] * min(case.gpus, 8)
    budgets = ["--device", str(device), "--host", str(host)]
    planned = _json(["plan", *shape, *budgets, "--zero", "3", "--precision", "bf16", "--json"])
    last = rehearsed["steps"][-1]
    return {
        **dataclasses.asdict(case),
        "fits": rehearsed["fits"],
        "settled_after_steps": rehearsed["settled_after_steps"],
        "step_s": rehearsed["step_s"],
        "device_peak_bytes": max(step["device_peak_nbytes"] for step in rehearsed["steps"]),
        "device_budget_bytes": rehearsed["device_budget_nbytes"],
        "host_peak_bytes": last["host_peak_nbytes"],
        "host_budget_bytes": rehearsed["host_budget_nbytes"],
        "recompute_s": last["recompute_s"],
        "failure": rehearsed["failure"],
        "planned_step_s": planned.get("step_s"),
        "took_s": rehearsed["took_s"],
    }


def _json(command: list[str]) -> dict[str, Any]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = memo(command)
    found: dict[str, Any] = json.loads(out.getvalue()) if out.getvalue().strip() else {}
    return found | {"exit_code": code}


def _line(row: dict[str, Any]) -> str:
    name = f"{row['model']} {row['tokens']} on {row['gpus']} (tp {row['tp']}, cp {row['cp']})"
    if not row["fits"]:
        return f"{name}: {row['failure'] or 'a budget was exceeded'}"
    off = row["step_s"] / row["planned_step_s"] - 1 if row["planned_step_s"] else float("nan")
    return (
        f"{name}: {row['step_s']:.2f} s after {row['settled_after_steps']} steps, {off:+.1%} of memo plan's; device "
        f"{format_bytes(row['device_peak_bytes'])} of {format_bytes(row['device_budget_bytes'])}, host "
        f"{format_bytes(row['host_peak_bytes'])} of {format_bytes(row['host_budget_bytes'])}; took {row['took_s']:.0f} s"
    )


if __name__ == "__main__":
    main()
