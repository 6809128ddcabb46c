"""Measures `memo record` as a user runs it: one process a run, wall and CPU time and memory of the whole command.

Arms run in turns, and the table gives the least and the middle of the rounds. The first two are what any program pays that
computes shapes with torch: its import, and making a FakeTensorMode. The result goes to benchmarks/results/.

    python -m benchmarks.record [--rounds 5] [--no-write]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from typing import Any

from benchmarks.results import write_result

MEMO = [sys.executable, "-m", "memo.cli.main", "record", "--model", "7b", "--json"]
ARMS = {
    "import torch": [sys.executable, "-c", "import torch"],
    "fake mode": [sys.executable, "-c", "import torch._subclasses.fake_tensor as f; f.FakeTensorMode()"],
    "32 layers, 8k": [*MEMO, "--seq", "8k"],
    "32 layers, 8k, checkpoint": [*MEMO, "--seq", "8k", "--checkpoint"],
    "32 layers, 8k, alpha 0.25": [*MEMO, "--seq", "8k", "--alpha", "0.25"],
    "32 layers, 1m": [*MEMO, "--seq", "1m"],
    "32 layers, 1m, alpha 0.25": [*MEMO, "--seq", "1m", "--alpha", "0.25"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-write", action="store_true")
    args = parser.parse_args()
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in ARMS}
    for _ in range(args.rounds):
        for name, command in ARMS.items():
            runs[name].append(measure(command))
    table = [summarise(name, measured) for name, measured in runs.items()]
    print(f"{'arm':28} {'wall s':>14} {'CPU s':>14} {'peak MiB':>9}")
    for row in table:
        wall, cpu = (f"{row[f'least_{kind}_s']:.2f} / {row[f'median_{kind}_s']:.2f}" for kind in ("wall", "cpu"))
        print(f"{row['arm']:28} {wall:>14} {cpu:>14} {row['peak_rss_bytes'] / 2**20:>9.0f}")
    if not args.no_write:
        print(f"Wrote {write_result('record', {'rounds': args.rounds, 'arms': table})}")


def measure(command: list[str]) -> dict[str, float]:
    """One run of the command, alone in its process."""
    environment = dict(os.environ, OMP_NUM_THREADS="1")
    began = time.monotonic()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=environment)
    _, status, usage = os.wait4(process.pid, 0)
    wall_s = time.monotonic() - began
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    return {"wall_s": wall_s, "cpu_s": usage.ru_utime + usage.ru_stime, "peak_rss_bytes": usage.ru_maxrss * 1024}


def summarise(name: str, runs: list[dict[str, float]]) -> dict[str, Any]:
    """The least and the middle of what was measured."""
    row: dict[str, Any] = {"arm": name}
    for kind in ("wall_s", "cpu_s"):
        values = [run[kind] for run in runs]
        row |= {f"least_{kind}": round(min(values), 3), f"median_{kind}": round(statistics.median(values), 3)}
    return row | {"peak_rss_bytes": int(max(run["peak_rss_bytes"] for run in runs))}


if __name__ == "__main__":
    main()
