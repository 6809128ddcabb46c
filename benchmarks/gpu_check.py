"""`make gpu-check`: everything that needs a GPU, in one command, within ten minutes.

    python3 -m benchmarks.gpu_check                  all of it
    python3 -m benchmarks.gpu_check smoke swap       parts of it, in the order given

    smoke        does each piece work at all: a line a check, within a minute (benchmarks.gpu_smoke)
    swap         tests of the engine: gradients, streams, tiers, memory
    table        350m at 8k tokens beside other ways to fit it (benchmarks.gpu_bench)
    arena        tests of the planned allocator
    rates        each kernel against a device copy (benchmarks.kernels)
    kernels      tests of the kernels
    allocators   the planned allocator beside torch's (benchmarks.gpu_allocator)

Runs with the interpreter and the tree that it is started with, installed or not, and installs nothing. It prints what comes
as it comes and writes a dated result file, anew after each test and each part, so that what is stopped from outside leaves
what it had. A part for which packages are missing is left out with a line. Exits 3 where there is no CUDA GPU, 2 for what is
no part, 1 when a part is left out, a test fails or a figure is not what was promised.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.machine import DETERMINISTIC, TESTING, describe, gpu, missing, no_gpu
from benchmarks.results import ROOT, write_result

TEST_LIMIT_S = 60
"""For one test: what hangs must not take its part's time from all others."""
SHOWN_WARNINGS = ("-W", "default", "-W", "error::pytest.PytestUnraisableExceptionWarning")
"""Another version of torch may warn of what pyproject.toml does not know by name."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One part: a benchmark's command line or some tests."""

    limit_s: int
    module: tuple[str, ...] = ()
    """Module and arguments behind `python -m`."""
    tests: tuple[str, ...] = ()
    """Files and folders with tests marked `gpu`; collecting all others would take minutes, and packages only they need."""
    ignored: tuple[str, ...] = ()
    """Files in these folders that another part runs."""


PARTS: dict[str, Part] = {
    "smoke": Part(limit_s=70, module=("benchmarks.gpu_smoke",)),
    "swap": Part(
        limit_s=110,
        tests=("tests/gpu", "tests/gpt/model/test_attention.py"),
        ignored=("tests/gpu/test_arena_cuda.py",),
    ),
    "table": Part(limit_s=80, module=("benchmarks.gpu_bench", "short")),
    "arena": Part(limit_s=100, tests=("tests/gpu/test_arena_cuda.py",)),
    "rates": Part(limit_s=40, module=("benchmarks.kernels",)),
    "kernels": Part(limit_s=60, tests=("tests/kernels",)),
    "allocators": Part(limit_s=100, module=("benchmarks.gpu_allocator", "--seq", "32k", "--steps", "12")),
}
"""In the order in which they run. Together under ten minutes: what lends GPUs may end a command then."""


def lines_of(command: Sequence[str], *, limit_s: float, extra: Mapping[str, str] | None = None) -> Iterator[str | int]:
    """The command's output, line by line, and at last its exit code; no process of its outlives `limit_s` or this one."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={
            **os.environ,
            "PYTHONUNBUFFERED": "1",
            "PYTHONPATH": with_root(os.environ.get("PYTHONPATH")),
            **(extra or {}),
        },
        start_new_session=True,  # so that its own children end with it, and let go of the GPU
    )
    watch = threading.Timer(limit_s, os.killpg, (process.pid, signal.SIGKILL))
    watch.start()
    assert process.stdout is not None
    try:
        for line in process.stdout:
            yield line.rstrip("\n")
        yield process.wait()
    finally:
        watch.cancel()
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        process.stdout.close()


def with_root(path: str | None) -> str:
    """PYTHONPATH with this tree: tests start processes of their own, elsewhere, and it may not be installed."""
    return os.pathsep.join([str(ROOT), *([path] if path else [])])


class Course:
    """A part under way: its last line and its tests' outcomes, given to `keep` as they come."""

    def __init__(self, limit_s: float, keep: Callable[[dict[str, Any]], None]) -> None:
        self._limit_s = limit_s
        self._keep = keep
        self._begin = time.monotonic()
        self._last = ""
        self._exit: int | None = None
        self._ended: Counter[str] = Counter()
        self._failed: list[str] = []

    def follow(self, command: Sequence[str]) -> dict[str, Any]:
        """Runs the command, passing on what it says; its result."""
        with contextlib.closing(lines_of(command, limit_s=self._limit_s, extra=DETERMINISTIC)) as lines:
            for said in lines:
                if isinstance(said, int):
                    self._exit = said
                else:
                    print(said, flush=True)
                    self._last = said.strip("= ") or self._last
                    self._count(said.split())
        self._keep(self.result())
        return self.result()

    def _count(self, words: list[str]) -> None:
        """Counts a test that ended, by its line in the course of the run; the summary's lines begin with the outcome."""
        outcome = next((word for word in words if word in ("PASSED", "FAILED", "ERROR", "SKIPPED")), None)
        test = next((word for word in words if "::" in word), None)
        if outcome is None or test is None or words[0] == outcome:
            return
        self._ended[outcome.lower()] += 1
        if outcome in ("FAILED", "ERROR"):
            self._failed.append(test)
        self._keep(self.result())

    def result(self) -> dict[str, Any]:
        """The result so far; `exit` is None while the part runs."""
        stopped = self._exit == -signal.SIGKILL
        tests = {"tests": dict(self._ended), "failed": self._failed} if self._ended else {}
        return {
            "exit": self._exit,
            "seconds": round(time.monotonic() - self._begin, 1),
            "summary": f"stopped after {self._limit_s:.0f} s" if stopped else self._last,
            **tests,
        }


def run_part(part: Part, keep: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Runs one part; `keep` is given its result whenever more is known."""
    lacks = missing(TESTING if part.tests else ())
    if lacks:
        left_out = {"exit": 1, "seconds": 0.0, "summary": f"left out: {', '.join(lacks)} not installed"}
        keep(left_out)
        return left_out
    command = [sys.executable, "-m", *(pytest_command(part) if part.tests else part.module)]
    return Course(part.limit_s, keep).follow(command)


def pytest_command(part: Part) -> list[str]:
    """The part's tests that are marked `gpu`."""
    # Most of the time goes into processes that import torch and kernels that are compiled: several at a time, if may be.
    workers = ["-n", "4"] if importlib.util.find_spec("xdist") is not None else []
    command = ["pytest", *SHOWN_WARNINGS, "-m", "gpu", "-v", "--no-header", "--tb=short", "--maxfail=10"]
    ignored = [f"--ignore={path}" for path in part.ignored]
    return [*command, "--timeout", str(TEST_LIMIT_S), *workers, *ignored, *part.tests]


def main(wanted: list[str]) -> int:
    unknown = [name for name in wanted if name not in PARTS]
    if unknown:
        print(f"gpu-check: no part is called {unknown[0]!r}; there are {', '.join(PARTS)}", file=sys.stderr)
        return 2
    device = gpu()
    if device is None:
        return no_gpu("gpu-check")
    print(describe(device), flush=True)
    done: dict[str, dict[str, Any]] = {}
    for name in wanted or PARTS:

        def keep(result: dict[str, Any], name: str = name) -> None:
            done[name] = result
            write_result("gpu-check", {"device": device, **done})

        print(f"\n== {name}, {PARTS[name].limit_s} s at most", flush=True)
        run_part(PARTS[name], keep)
    for name, result in done.items():
        verdict = "as promised" if result["exit"] == 0 else "FAILED, see above"
        print(f"{name:10} {verdict:17} {result['seconds']:6.1f} s  {result['summary']}")
    print(f"Wrote {write_result('gpu-check', {'device': device, **done})}")
    return 1 if any(result["exit"] for result in done.values()) else 0


def _end(*_: object) -> None:
    """On SIGTERM: ends as by an error, so that what this process started ends too."""
    sys.exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _end)
    sys.exit(main(sys.argv[1:]))
