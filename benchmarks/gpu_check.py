"""`make gpu-check`: everything that needs a GPU, in one command, within ten minutes.

    python3 -m benchmarks.gpu_check                  all of it
    python3 -m benchmarks.gpu_check tests kernels    parts of it: tests, table, kernels, allocators

Runs the tests marked `gpu`, a short speed table, kernels and allocators with the interpreter it is started with, installs
nothing but this package (offline), prints a summary and writes a dated JSON file, anew after each part, so that what is
stopped from outside leaves the parts before. Exits 3 where there is no CUDA GPU, 2 for what is no part, 1 when a package is
missing, a test fails or a figure is not what was promised.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.results import write_result

ROOT = Path(__file__).parent.parent
NO_GPU = 3
# Together under ten minutes: what lends GPUs may end a command then.
TEST_LIMIT_S = 240
TABLE_LIMIT_S = 100
KERNELS_LIMIT_S = 50
ALLOCATORS_LIMIT_S = 170

GPU_TESTS = ("tests/gpu", "tests/kernels", "tests/gpt/test_attention.py")
"""Where tests are marked `gpu`: to collect all others would take minutes, and packages that only they need."""
NEEDED = {"pulp": "pulp", "highspy": "highspy", "rich": "rich", "pytest": "pytest"}
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


def run_tests() -> tuple[int, str, float]:
    """(exit code, pytest's last line, seconds)."""
    begin = time.monotonic()
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "gpu",
        "-q",
        "--no-header",
        "--maxfail=10",
        *_workers(),
        *GPU_TESTS,
    ]
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            timeout=TEST_LIMIT_S,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
            env=os.environ | DETERMINISTIC,
        )
    except subprocess.TimeoutExpired as late:
        tail = (late.stdout or b"")[-2000:]
        print(tail.decode(errors="replace") if isinstance(tail, bytes) else tail)
        return 1, f"stopped after {TEST_LIMIT_S} s", time.monotonic() - begin
    print(done.stdout)
    lines = done.stdout.strip().splitlines()
    return done.returncode, lines[-1] if lines else "no output", time.monotonic() - begin


def run_module(*command: str, limit_s: float) -> int:
    """The module's exit code; 1 when it takes too long."""
    try:
        return subprocess.run([sys.executable, "-m", *command], cwd=ROOT, timeout=limit_s, check=False).returncode
    except subprocess.TimeoutExpired:
        print(f"{command[0]}: stopped after {limit_s} s", file=sys.stderr)
        return 1


def _tests() -> dict[str, Any]:
    code, summary, seconds = run_tests()
    return {"exit": code, "summary": summary, "seconds": round(seconds, 1)}


def _module(*command: str, limit_s: float) -> Callable[[], dict[str, Any]]:
    return lambda: {"exit": run_module(*command, limit_s=limit_s)}


PARTS: dict[str, Callable[[], dict[str, Any]]] = {
    "tests": _tests,
    "table": _module("benchmarks.gpu_bench", "short", limit_s=TABLE_LIMIT_S),
    "kernels": _module("benchmarks.kernels", limit_s=KERNELS_LIMIT_S),
    "allocators": _module("benchmarks.gpu_allocator", "--seq", "32k", "--steps", "12", limit_s=ALLOCATORS_LIMIT_S),
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
        done[name] = PARTS[name]()
        path = write_result("gpu-check", {"device": device, **done})
    for name, result in done.items():
        print(f"{name}: {'as promised' if result['exit'] == 0 else 'failed, see above'} {result.get('summary', '')}")
    print(f"Wrote {path}")
    return 1 if any(result["exit"] for result in done.values()) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
