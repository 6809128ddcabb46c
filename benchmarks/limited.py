"""Runs a program under a limit of its data (heap and private mappings, RLIMIT_DATA) that the kernel enforces."""

from __future__ import annotations

import dataclasses
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

LIMITED = """
import resource, runpy, sys
limit = int(sys.argv.pop(1))
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LimitedRun:
    """What became of one run."""

    printed: list[str]
    """Its lines on stdout."""
    wall_s: float
    cpu_s: float
    """Processor time, which other work on the machine hardly changes."""
    peak_rss_bytes: int
    failed: str | None
    """The line that it ended with, if it ended badly."""


def run_limited(script: Path, flags: Sequence[str], *, limit: int, threads: int) -> LimitedRun:
    """One run of a Python script, in a process of its own."""
    with tempfile.TemporaryFile("w+") as errors:
        begin = time.perf_counter()
        process = subprocess.Popen(
            [sys.executable, "-c", LIMITED, str(limit), str(script), *flags],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        )
        assert process.stdout is not None
        printed = process.stdout.read().splitlines()
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        wall_s = time.perf_counter() - begin
        errors.seek(0)
        said = errors.read().strip().splitlines() or ["it left no word"]
    return LimitedRun(
        printed=printed,
        wall_s=wall_s,
        cpu_s=usage.ru_utime + usage.ru_stime,
        peak_rss_bytes=usage.ru_maxrss << 10,
        failed=f"ended with {process.returncode}: {said[-1]}" if process.returncode else None,
    )


def taken_bytes() -> int:
    """Data of this process now, as the limit counts it."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmData:"))


def use_at_most(nbytes: int) -> None:
    """Limits the data of this process from now on."""
    resource.setrlimit(resource.RLIMIT_DATA, (nbytes, nbytes))
