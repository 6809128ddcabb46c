"""Longest sequences of Llama-3-8B by `memo plan --max-seq`, for budgets of host memory and disk.

The table is in docs/activation-plan.md.

    python -m benchmarks.longest_plans [--write]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from typing import Any

from benchmarks.results import write_result

WAYS = {
    "1 GPU, LoRA of rank 16": ["--lora", "16"],
    "1 GPU, all parameters": ["--optimizer-offload"],
    "8 GPUs, all parameters": ["--gpus", "8", "--cp", "8", "--zero", "3"],
}
HOSTS = ("128GiB", "512GiB", "1TiB", "2TiB")
DISKS = (None, "2TB", "8TB")


def longest(way: str, host: str, disk: str | None) -> dict[str, Any]:
    """The longest sequence with its step; without tokens where not even 1,024 fit."""
    command = [
        sys.executable,
        "-m",
        "memo.cli.main",
        "plan",
        "--model",
        "llama3-8b",
        "--gpu",
        "h100",
        "--precision",
        "bf16",
    ]
    command += ["--max-seq", "--json", *WAYS[way], "--host", host, *(["--disk-budget", disk] if disk else [])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found: dict[str, Any] = {"way": way, "host": host, "disk": disk}
    if done.returncode:
        return found | {"why": done.stderr.strip().splitlines()[-1]}
    plan = json.loads(done.stdout)
    names = ("tokens", "step_s", "mlp_tiles", "binds")
    return found | {name: plan[name] for name in names} | {"budgets": plan["budgets"], "device": plan["memory"]}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write a result file")
    rows = []
    args = parser.parse_args()
    for way in WAYS:
        for disk in DISKS:
            for host in HOSTS:
                rows.append(longest(way, host, disk))
                row = rows[-1]
                print(way, host, disk, row.get("tokens", row.get("why")), row.get("step_s"), flush=True)
    if args.write:
        print(f"Wrote {write_result('longest-plans', {'rows': rows})}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
