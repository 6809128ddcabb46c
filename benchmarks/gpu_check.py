"""`make gpu-check`: everything that needs a GPU, in one command, within twelve minutes.

    python3 -m benchmarks.gpu_check

Runs the tests marked `gpu`, a short speed table, kernels and allocators with the interpreter it is started with, installs
nothing but this package (offline), prints a summary and writes a dated JSON file. Exits 3 where there is no CUDA GPU, 1 when
a test fails or a figure is not what was promised.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.results import write_result

ROOT = Path(__file__).parent.parent
NO_GPU = 3
TEST_LIMIT_S = 270
TABLE_LIMIT_S = 150
ALLOCATORS_LIMIT_S = 240
KERNELS_LIMIT_S = 60


def gpu() -> dict[str, Any] | None:
    """What the GPU is, or None when there is none that torch can use."""
    try:
        import torch
    except ImportError:
        return None
    if not torch.cuda.is_available():
        return None
    properties = torch.cuda.get_device_properties(0)
    driver = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        check=False,
    )
    return {
        "gpu": properties.name,
        "memory_bytes": properties.total_memory,
        "driver": driver.stdout.strip().splitlines()[0] if driver.stdout.strip() else "unknown",
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }


def install() -> None:
    """Makes `import memo` work with this interpreter; takes nothing from a registry."""
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "-e", str(ROOT)]
    subprocess.run(command, check=True)


def run_tests() -> tuple[int, str, float]:
    """(exit code, pytest's last line, seconds)."""
    begin = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "--no-header", "--maxfail=10", "tests"]
    try:
        done = subprocess.run(command, cwd=ROOT, timeout=TEST_LIMIT_S, stdout=subprocess.PIPE, text=True, check=False)
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


def main() -> int:
    device = gpu()
    if device is None:
        print("gpu-check: no CUDA GPU that this interpreter's torch can use; nothing was run", file=sys.stderr)
        return NO_GPU
    install()
    print(f"{device['gpu']}, driver {device['driver']}, torch {device['torch']}")
    code, summary, seconds = run_tests()
    table = run_module("benchmarks.gpu_bench", "short", limit_s=TABLE_LIMIT_S)
    kernels = run_module("benchmarks.kernels", limit_s=KERNELS_LIMIT_S)
    allocators = run_module("benchmarks.gpu_allocator", limit_s=ALLOCATORS_LIMIT_S)
    path = write_result(
        "gpu-check",
        {
            "device": device,
            "tests": summary,
            "tests_exit": code,
            "tests_s": seconds,
            "table_exit": table,
            "kernels_exit": kernels,
            "allocators_exit": allocators,
        },
    )
    print(f"tests: {summary}\nspeed table: {'done' if table == 0 else 'failed'}")
    print(f"kernels: {'at the bandwidth asked for' if kernels == 0 else 'failed or too slow'}")
    print(f"allocators: {'as promised' if allocators == 0 else 'failed, see above'}\nWrote {path}")
    return 0 if code == table == kernels == allocators == 0 else 1


if __name__ == "__main__":
    sys.exit(main())
