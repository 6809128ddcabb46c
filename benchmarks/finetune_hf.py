"""examples/finetune_hf.py under a limit of memory that the same run without memo does not survive: who trains, and how well.

    python -m benchmarks.finetune_hf [--limit 768MiB] [--seq 8k] [--steps 2] [--threads 2]

An unmodified Hugging Face Llama in float32, its activations on disk with alpha 0.25, in a process whose data (heap and
private mappings, RLIMIT_DATA) the kernel limits; the same without memo under the same limit; and without memo and without
limit, for the losses. Time is told by the clock and as the processor time of the process.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import sys
from pathlib import Path
from typing import Any

from benchmarks.limited import LimitedRun, run_limited
from benchmarks.results import write_result
from memo.units import format_bytes, format_duration, parse_bytes

EXAMPLE = Path(__file__).parent.parent / "examples" / "finetune_hf.py"
NO_LIMIT = -1
"""RLIM_INFINITY"""


def losses(run: LimitedRun) -> list[str]:
    """Of each step, with all digits."""
    return [match[1] for line in run.printed if (match := re.match(r"step \d+  loss (\S+)", line))]


def run_arms(flags: list[str], *, limit: int, threads: int) -> dict[str, LimitedRun]:
    """Each in a process of its own, one after the other."""
    arms = {
        "with memo": (["--alpha", "0.25"], limit),
        "without memo": (["--without-memo"], limit),
        "without memo, no limit": (["--without-memo"], NO_LIMIT),
    }
    runs = {}
    for name, (more, nbytes) in arms.items():
        runs[name] = run_limited(EXAMPLE, [*flags, *more], limit=nbytes, threads=threads)
        print(f"{name:22}  {told(runs[name])}", flush=True)
    return runs


def told(run: LimitedRun) -> str:
    if run.failed is not None:
        return f"fails after {len(losses(run))} steps: {run.failed}"
    return (
        f"{len(losses(run))} steps in {format_duration(run.wall_s)} by the clock, {format_duration(run.cpu_s)} of "
        f"processor time, peak resident {format_bytes(run.peak_rss_bytes)}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--limit", default="768MiB")
    parser.add_argument("--seq", default="8k")
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    limit = parse_bytes(args.limit, what="limit")
    print(f"{args.seq} tokens, {format_bytes(limit)} of data")
    runs = run_arms(["--seq", args.seq, "--steps", str(args.steps), "--digits", "9"], limit=limit, threads=args.threads)
    ours, refused, free = runs.values()
    equal = losses(ours) == losses(free)
    print(f"losses with memo and without: {'identical to the last bit' if equal else 'DIFFERENT'}")
    body: dict[str, Any] = {"seq": args.seq, "steps": args.steps, "threads": args.threads, "limit_bytes": limit}
    body |= {"arms": {name: dataclasses.asdict(run) for name, run in runs.items()}, "losses_equal": equal}
    print(f"Wrote {write_result('finetune-hf', {**body, 'load_average': os.getloadavg()})}")
    return 0 if ours.failed is None and refused.failed is not None and free.failed is None and equal else 1


if __name__ == "__main__":
    sys.exit(main())
