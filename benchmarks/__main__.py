"""`make bench ARMS="hook_cost disk"`: runs benchmarks that need no GPU by name; without a name lists them."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

ELSEWHERE = ("__main__", "machine", "kernels", "gpu_")
"""Beginnings of the names of modules that run otherwise, as by `make gpu-check` and `make gpu-bench`."""


def main(names: list[str]) -> int:
    here = Path(__file__).parent
    modules = {path.stem: path for path in sorted(here.glob("*.py"))}
    modules |= {path.parent.name: path for path in sorted(here.glob("*/__main__.py"))}
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
        status = _run(name)
        if status:
            return status
    return 0


def _run(name: str) -> int:
    """Runs one to its end; a package ends with its status."""
    try:
        runpy.run_module(f"benchmarks.{name}", run_name="__main__")
    except SystemExit as ended:
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
