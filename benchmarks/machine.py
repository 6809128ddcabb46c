"""The machine that a benchmark runs on: its GPU, the versions that results depend on, the packages that it lacks.

python3 -m benchmarks.machine      prints the GPU and the versions; exit 3 without a GPU
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

NO_GPU = 3
"""Exit code of every benchmark that needs a GPU, where there is none."""
_NO_CUDA_GPU = "no CUDA GPU that this interpreter's torch can use"
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
"""Without it torch refuses matrix products where only deterministic algorithms are allowed, as in tests of equal bits."""
SOLVER = ("pulp", "highspy")
"""Packages that plans need. `memo.offload` at a fixed alpha needs neither."""
TESTING = ("pytest", "pytest_timeout")
"""Packages that the tests marked `gpu` need."""
VERSIONS = {
    "triton": ("triton",),
    "kvikio": ("kvikio-cu13", "kvikio-cu12", "kvikio"),
    "flash_attn": ("flash-attn",),
    "pulp": ("pulp",),
    "highspy": ("highspy",),
}
"""Import name to the distributions that may hold it."""


def version(name: str) -> str:
    """The installed version of an optional package, found without importing it."""
    if importlib.util.find_spec(name) is None:
        return "not installed"
    for distribution in VERSIONS[name]:
        try:
            return importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            continue
    return "unknown"


def missing(names: Iterable[str]) -> list[str]:
    """Those of these packages, by import name, that are not there."""
    return [name for name in names if importlib.util.find_spec(name) is None]


def no_solver() -> str | None:
    """Reason why no plan can be made here; None where one can."""
    absent = missing(SOLVER)
    return f"a plan needs {' and '.join(absent)}, not installed here" if absent else None


def gpu() -> dict[str, Any] | None:
    """The GPU and the versions around it, as result files carry them; None where torch can use no GPU."""
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
        "driver": driver(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        **{name: version(name) for name in VERSIONS},
    }


def no_gpu(benchmark: str) -> int:
    """Says that `benchmark` ran nothing for want of a GPU; returns its exit code."""
    print(f"{benchmark}: {_NO_CUDA_GPU}; nothing was run", file=sys.stderr)
    return NO_GPU


def driver() -> str:
    """The driver's version."""
    return nvidia_smi("driver_version")


def nvidia_smi(*queries: str) -> str:
    """The first GPU's answer to these queries of nvidia-smi."""
    command = ["nvidia-smi", f"--query-gpu={','.join(queries)}", "--format=csv,noheader"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    except OSError:  # a container may have the driver and not its tools
        said = []
    return said[0] if said else "unknown"


def describe(device: dict[str, Any]) -> str:
    """The line that a run on a GPU begins with."""
    return ", ".join(
        [
            f"{device['gpu']}: driver {device['driver']}",
            *(f"{name} {device[name]}" for name in ("python", "torch", "cuda")),
            *(f"{name}: {device[name]}" for name in VERSIONS),
        ]
    )


if __name__ == "__main__":
    found = gpu()
    print(_NO_CUDA_GPU if found is None else describe(found))
    sys.exit(NO_GPU if found is None else 0)
