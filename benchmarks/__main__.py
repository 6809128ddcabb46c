"""`make bench ARMS="hook_cost disk"`: runs benchmarks that need no GPU by name; without a name lists them."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

ELSEWHERE = ("__main__", "machine", "kernels", "gpu_")
"""Beginnings of the names of modules that run otherwise, as by `make gpu-check` and `make gpu-bench`."""


def main(names: list[str]) -> int:
    modules = {path.stem: path for path in sorted(Path(__file__).parent.glob("*.py"))}
    runnable = {
        name: path
        for name, path in modules.items()
        if not name.startswith(ELSEWHERE) and '__name__ == "__main__"' in path.read_text()
    }
    if not names or names == ["all"]:
        for name, path in runnable.items():
            print(f"{name:16} {path.read_text().splitlines()[0].strip(chr(34))}")
        print('\nmake bench ARMS="NAME ..." runs them')
        return 0
    for name in names:
        if name not in runnable:
            print(f"benchmarks: unknown {name!r}; one of {', '.join(runnable)}", file=sys.stderr)
            return 2
        sys.argv = [name]
        runpy.run_module(f"benchmarks.{name}", run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
