"""The laptop preset of examples/train_1m.py under a limit of memory that the same run without memo does not survive.

    python -m benchmarks.laptop_1m [--limit 1.2GiB] [--seq 32k] [--steps 3] [--threads 2]

Each arm is a process of its own whose data (heap and private mappings, RLIMIT_DATA) the kernel limits: 32,768 tokens of the
source of Python's standard library, activations to disk with alpha 0.25, and then the same with `--offload none`. Time is
told twice: by the clock, and as the processor time of the process, which other work on the machine hardly changes.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.limited import run_limited
from benchmarks.results import write_result
from memo.units import format_bytes, format_duration, parse_bytes

EXAMPLE = Path(__file__).parent.parent / "examples" / "train_1m.py"


def run_arm(flags: list[str], *, limit: int, threads: int) -> dict[str, Any]:
    """One run of the example; its steps, times and peak, or under "failed" the line that it ended with."""
    with tempfile.TemporaryDirectory(prefix="memo-laptop-") as folder:
        metrics = Path(folder) / "metrics.jsonl"
        given = ["--preset", "laptop", *flags, "--metrics", str(metrics)]
        done = run_limited(EXAMPLE, given, limit=limit, threads=threads)
        steps = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
    return {
        "wall_s": done.wall_s,
        "cpu_s": done.cpu_s,
        "peak_rss_bytes": done.peak_rss_bytes,
        "losses": [step["loss"] for step in steps],
        "disk_bytes": [step["disk_bytes"] for step in steps],
        "plan": [line for line in done.printed if line.startswith("plan")],
        **({} if done.failed is None else {"failed": done.failed}),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", default="1.2GiB")
    parser.add_argument("--seq", default="32k")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    limit = parse_bytes(args.limit, what="limit")
    flags = ["--seq", args.seq, "--steps", str(args.steps)]
    arms = {}
    for name, more in {"with memo": [], "without memo": ["--offload", "none"]}.items():
        arms[name] = run_arm([*flags, *more], limit=limit, threads=args.threads)
        print(f"{name:12}  limit {format_bytes(limit)}  {told(arms[name])}", flush=True)
    body = {"seq": args.seq, "steps": args.steps, "threads": args.threads, "limit_bytes": limit, "arms": arms}
    print(f"Wrote {write_result('laptop-1m', {**body, 'load_average': os.getloadavg()})}")
    return 0 if "failed" not in arms["with memo"] and "failed" in arms["without memo"] else 1


def told(result: dict[str, Any]) -> str:
    if "failed" in result:
        return f"fails after {len(result['losses'])} steps: {result['failed']}"
    return (
        f"{len(result['losses'])} steps in {format_duration(result['wall_s'])} by the clock, "
        f"{format_duration(result['cpu_s'])} of processor time, peak resident {format_bytes(result['peak_rss_bytes'])}"
    )


if __name__ == "__main__":
    sys.exit(main())
