"""Long contexts on several simulated GPUs: memo's defaults rehearsed on one rank, beside what `memo plan` predicts.

    python -m benchmarks.rehearsed_ranks [--only llama3-8b]

Each row is a training of memo's GPT in bfloat16 on nodes of 8 H100s, one sequence on all GPUs of a stage: `memo rehearse`
runs the engine, the planner, FSDP2 and torch's pipeline schedule on a simulated rank of each stage until its plan has
settled; `memo plan` gets the same budgets. A row is written at once.
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
from memo.machine import AUTO_HOST_SHARE
from memo.rehearsal import SimulatedMachine
from memo.units import format_bytes, parse_bytes


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
    pp: int = 1
    accumulate: int = 1
    schedule: str = "1f1b"


CASES = (
    *(Case("llama3-8b", tokens, 8, 1, 8, "1TiB") for tokens in ("128k", "256k", "512k", "1m")),
    *(Case("llama3-70b", tokens, 16, 1, 16, "1TiB") for tokens in ("32k", "64k", "128k")),
    Case("7b", "1m", 8, 1, 8, "2TiB"),
    Case("13b", "1m", 16, 2, 8, "2TiB"),
    Case("30b", "1m", 32, 4, 8, "2TiB"),
    Case("65b", "1m", 64, 8, 8, "2TiB"),
    Case("7b", "128k", 8, 2, 1, "1TiB", pp=4, accumulate=8),
    Case("llama3-70b", "32k", 32, 8, 1, "1TiB", pp=4, accumulate=8),
    Case("13b", "128k", 16, 2, 4, "1TiB", pp=2, accumulate=4, schedule="gpipe"),
    Case("llama3-8b", "64k", 8, 2, 1, "1TiB", pp=4, accumulate=8, schedule="interleaved-1f1b"),
)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.rehearsed_ranks", description=__doc__)
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="cases whose model, or schedule with --pp, has this text"
    )
    args = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for case in CASES:
        if args.only in f"{case.model} {case.schedule if case.pp > 1 else ''}":
            rows.append(_row(case))
            print(_line(rows[-1]), flush=True)
            write_result("rehearsed-ranks", {"rows": rows})


def _row(case: Case) -> dict[str, Any]:
    shape = ["--model", case.model, "--seq", case.tokens, "--gpus", str(case.gpus), "--gpu", "h100"]
    shape += ["--tp", str(case.tp), "--cp", str(case.cp), "--accumulate", str(case.accumulate)]
    shape += ["--pp", str(case.pp), "--schedule", case.schedule]
    rehearsed = _json(["rehearse", *shape, "--host-memory", case.host_memory, "--json"])
    device = SimulatedMachine("h100").device_budget(None).total_bytes
    stages = rehearsed.get("stages", [rehearsed])
    host = int(parse_bytes(case.host_memory) * AUTO_HOST_SHARE)
    budgets = ["--device", str(device), "--host", str(host)]
    planned = _json(["plan", *shape, *budgets, "--zero", "3", "--precision", "bf16", "--json"])
    fullest = max(stages, key=lambda stage: stage["steps"][-1]["host_peak_nbytes"] / stage["host_budget_nbytes"])
    return {
        **dataclasses.asdict(case),
        "fits": rehearsed["fits"],
        "settled_after_steps": rehearsed["settled_after_steps"],
        "step_s": rehearsed["step_s"],
        "device_peak_bytes": max(step["device_peak_nbytes"] for stage in stages for step in stage["steps"]),
        "device_budget_bytes": device,
        "host_peak_bytes": fullest["steps"][-1]["host_peak_nbytes"],
        "host_budget_bytes": fullest["host_budget_nbytes"],
        "recompute_s": max(stage["steps"][-1]["recompute_s"] for stage in stages),
        "failure": next((stage["failure"] for stage in stages if stage["failure"]), None),
        "planned_step_s": planned.get("step_s"),
        "took_s": sum(stage["took_s"] for stage in stages),
    }


def _json(command: list[str]) -> dict[str, Any]:
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = memo(command)
    found: dict[str, Any] = json.loads(out.getvalue()) if out.getvalue().strip() else {}
    return found | {"exit_code": code}


def _line(row: dict[str, Any]) -> str:
    name = f"{row['model']} {row['tokens']} on {row['gpus']} (tp {row['tp']}, cp {row['cp']}, pp {row['pp']})"
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
