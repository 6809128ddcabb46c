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

Runs with the interpreter it is started with, installs nothing but this package (offline), prints what comes as it comes and
writes a dated JSON file, anew after each part, so that what is stopped from outside leaves the parts before. Exits 3 where
there is no CUDA GPU, 2 for what is no part, 1 when a package is missing, a test fails or a figure is not what was promised.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.results import write_result

ROOT = Path(__file__).parent.parent
NO_GPU = 3

GPU_TESTS: dict[str, tuple[str, ...]] = {
    "swap": (
        "tests/gpu/test_swap_cuda.py",
        "tests/gpt/test_attention.py",
        "tests/gpu/test_stream_sanitizer.py",
        "tests/gpu/test_ways_cuda.py",
        "tests/gpu/test_ring_cuda.py",
        "tests/gpu/test_norms_cuda.py",
    ),
    "arena": ("tests/gpu/test_arena_cuda.py",),
    "kernels": ("tests/kernels",),
}
"""Where tests are marked `gpu`: to collect all others would take minutes, and packages that only they need."""
LIMITS_S = {"smoke": 70, "swap": 110, "table": 80, "arena": 100, "rates": 40, "kernels": 60, "allocators": 100}
"""For each part, in order. Together under ten minutes: what lends GPUs may end a command then."""
TEST_LIMIT_S = 60
"""For one test: what hangs must not take its part's time from all others."""
NEEDED = {
    "numpy": "numpy",
    "pulp": "pulp",
    "highspy": "highspy",
    "rich": "rich",
    "pytest": "pytest",
    "pytest_timeout": "pytest-timeout",
}
"""Import name to package, beside torch: what `memo.offload` plans with, and what the tests run on."""
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Without it torch refuses matrix products where only deterministic algorithms are allowed, as in tests of equal bits."""


def gpu() -> dict[str, Any] | None:
    """What the GPU is, or None when there is none that torch can use."""
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "memory_bytes": properties.total_memory,
        "driver": _driver(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=False).stdout.split()
    except OSError:  # a container may have the driver and not its tools
        said = []
    return said[0] if said else "unknown"


def missing() -> list[str]:
    """Packages that must be there and are not."""
    return [package for name, package in NEEDED.items() if importlib.util.find_spec(name) is None]


def install() -> bool:
    """Makes `import memo` work with this interpreter; takes nothing from a registry."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "-e", str(ROOT)]
    return subprocess.run(command, check=False).returncode == 0


def _workers() -> list[str]:
    """Most of the time goes into processes that import torch and kernels that are compiled: several at a time, if may be."""
    return ["-n", "4"] if importlib.util.find_spec("xdist") is not None else []


def lines_of(command: Sequence[str], *, limit_s: float, extra: Mapping[str, str] | None = None) -> Iterator[str | int]:
    """What the command says, line by line, and at last its exit code; None of its processes outlives `limit_s`."""
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1", **(extra or {})},
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


def run_part(command: Sequence[str], *, limit_s: float) -> dict[str, Any]:
    """Runs one part, passing on what it says; its exit code, seconds and last line."""
    begin, last, code = time.monotonic(), "", 1
    for said in lines_of(command, limit_s=limit_s, extra=DETERMINISTIC):
        if isinstance(said, int):
            code = said
        else:
            print(said, flush=True)
            last = said or last
    return {"exit": code, "seconds": round(time.monotonic() - begin, 1), "summary": _summary(code, limit_s, last)}


def _summary(code: int, limit_s: float, last: str) -> str:
    return f"stopped after {limit_s:.0f} s" if code == -signal.SIGKILL else last


def run_tests(paths: Sequence[str], *, limit_s: float) -> dict[str, Any]:
    """Likewise of tests: how many ended how, and which failed, also when the time was too short for all."""
    begin, last, code = time.monotonic(), "", 1
    ended: Counter[str] = Counter()
    failed = []
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-v", "--no-header", "--tb=short", "--maxfail=10"]
    command += ["--timeout", str(TEST_LIMIT_S), *_workers(), *paths]
    for said in lines_of(command, limit_s=limit_s, extra=DETERMINISTIC):
        if isinstance(said, int):
            code = said
            continue
        print(said, flush=True)
        last = said or last
        words = said.split()
        outcome = next((word for word in words if word in ("PASSED", "FAILED", "ERROR", "SKIPPED")), None)
        # Its own line in the course of the run, not the summary's, which begins with the outcome.
        if outcome is not None and words[0] != outcome:
            ended[outcome.lower()] += 1
            if outcome in ("FAILED", "ERROR"):
                failed.append(next(word for word in words if "::" in word))
    return {
        "exit": code,
        "seconds": round(time.monotonic() - begin, 1),
        "summary": _summary(code, limit_s, last.strip("= ")),
        "tests": dict(ended),
        "failed": failed,
    }


def _workers() -> list[str]:
    """Most of the time goes into processes that import torch and kernels that are compiled: several at a time, if may be."""
    return ["-n", "4"] if importlib.util.find_spec("xdist") is not None else []


def _tests(name: str) -> Callable[[], dict[str, Any]]:
    return lambda: run_tests(GPU_TESTS[name], limit_s=LIMITS_S[name])


def _module(name: str, *command: str) -> Callable[[], dict[str, Any]]:
    return lambda: run_part([sys.executable, "-m", *command], limit_s=LIMITS_S[name])


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "smoke": _module("smoke", "benchmarks.gpu_smoke"),
    "swap": _tests("swap"),
    "table": _module("table", "benchmarks.gpu_bench", "short"),
    "arena": _tests("arena"),
    "rates": _module("rates", "benchmarks.kernels"),
    "kernels": _tests("kernels"),
    "allocators": _module("allocators", "benchmarks.gpu_allocator", "--seq", "32k", "--steps", "12"),
}


def main(wanted: list[str]) -> int:
    unknown = [name for name in wanted if name not in PARTS]
    if unknown:
        print(f"gpu-check: no part is called {unknown[0]!r}; there are {', '.join(PARTS)}", file=sys.stderr)
        return 2
    device = gpu()
    if device is None:
        print("gpu-check: no CUDA GPU that this interpreter's torch can use; nothing was run", file=sys.stderr)
        return NO_GPU
    if missing():
        print(f"gpu-check: {sys.executable} lacks {', '.join(missing())}; nothing was run", file=sys.stderr)
        return 1
    if not install():
        print("gpu-check: pip could not install this package, see above; nothing was run", file=sys.stderr)
        return 1
    print(f"{device['gpu']}, driver {device['driver']}, torch {device['torch']}", flush=True)
    done: dict[str, dict[str, Any]] = {}
    path = None
    for name in wanted or PARTS:
        print(f"\n== {name}, {LIMITS_S[name]} s at most", flush=True)
        done[name] = PARTS[name]()
        path = write_result("gpu-check", {"device": device, **done})
    for name, result in done.items():
        verdict = "as promised" if result["exit"] == 0 else "FAILED, see above"
        print(f"{name:10} {verdict:17} {result['seconds']:6.1f} s  {result['summary']}")
    print(f"Wrote {path}")
    return 1 if any(result["exit"] for result in done.values()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
