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
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.results import write_result
from memo.units import format_bytes, format_duration, parse_bytes

__all__ = ["run_arm"]

EXAMPLE = Path(__file__).parent.parent / "examples" / "train_1m.py"
LIMITED = """
import resource, runpy, sys
limit = int(sys.argv.pop(1))
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def run_arm(flags: list[str], *, limit: int, threads: int) -> dict[str, Any]:
    """One run of the example; its steps, times and peak, or under "failed" the line that it ended with."""
    with tempfile.TemporaryDirectory(prefix="memo-laptop-") as folder:
        metrics, said = Path(folder) / "metrics.jsonl", Path(folder) / "said"
        command = [sys.executable, "-c", LIMITED, str(limit), str(EXAMPLE), "--preset", "laptop", *flags]
        command += ["--metrics", str(metrics)]
        begin = time.perf_counter()
        with open(said, "w") as errors:
            process = subprocess.Popen(
                command,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": str(threads)},
            )
            assert process.stdout is not None
            printed = process.stdout.read()
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
        steps = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
        result: dict[str, Any] = {
            "wall_s": time.perf_counter() - begin,
            "cpu_s": usage.ru_utime + usage.ru_stime,
            "peak_rss_bytes": usage.ru_maxrss << 10,
            "losses": [step["loss"] for step in steps],
            "disk_bytes": [step["disk_bytes"] for step in steps],
            "plan": [line for line in printed.splitlines() if line.startswith("plan")],
        }
        if process.returncode != 0:
            last = (said.read_text().strip().splitlines() or ["it left no word"])[-1]
            result["failed"] = f"ended with {process.returncode}: {last}"
        return result


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
