"""Measures the address planner on every instance of a folder and on generated irregular traces; prints one table.

Each row is a cold `solve` in this process (the compiled search is built before the first). An instance whose name
carries a capacity (A.1048576.csv) is solved at it, and C at its lower bound besides. The result goes to
benchmarks/results/ with the hardware and the commit.

    python -m benchmarks.pack [FOLDER] [--time-limit 60s] [--only SUBSTRING] [--no-write]
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import os
import platform
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.irregular_buffers import Shape, irregular_buffers
from memo.errors import MemoError
from memo.mip.address.checker import require_valid
from memo.mip.address.files import read_problem
from memo.mip.address.problem import DEVICE, Buffer, Problem
from memo.mip.address.solver import solve
from memo.units import parse_duration_s

ROOT = Path(__file__).resolve().parent
GAP_OF_LARGE = 0.01
"""Gap allowed for the 20,000-buffer traces; the others must reach the optimum or their capacity."""

IRREGULAR = {
    "irregular-300": Shape(layers=8, microbatches=1, seed=1),
    "irregular-600": Shape(layers=8, microbatches=2, seed=2),
    "irregular-2400": Shape(layers=16, microbatches=4, seed=3),
    "irregular-4800": Shape(layers=32, microbatches=4, in_flight=4, kv_heads=4, seed=4),
    "irregular-6000": Shape(
        layers=24, microbatches=6, in_flight=3, kv_heads=3, swapped=0.9, drain_bytes_per_tick=60_000_000, seed=13
    ),
    "irregular-7200": Shape(layers=48, microbatches=4, drain_bytes_per_tick=12_000_000, seed=5),
}
LARGE = {
    "large-20000": Shape(layers=70, microbatches=8, drain_bytes_per_tick=60_000_000, swapped=0.9, seed=21),
    "large-20000-keep": Shape(layers=70, microbatches=8, drain_bytes_per_tick=60_000_000, swapped=0.3, seed=22),
    "large-24000-backlog": Shape(layers=80, microbatches=8, in_flight=3, seed=6),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row of the table."""

    name: str
    problem: Problem
    gap: float = 0.0


def cases(folder: Path) -> Iterator[Case]:
    """The folder's instances, then the generated ones."""
    for path in sorted(folder.glob("*.csv")):
        problem = read_problem(path)
        named = re.fullmatch(r".*\.(\d+)", path.stem)
        if named:
            yield Case(name=path.stem, problem=dataclasses.replace(problem, capacities={DEVICE: int(named[1])}))
        if not named or path.stem.startswith("C."):
            yield Case(name=f"{path.stem.split('.')[0]}, smallest" if named else path.stem, problem=problem)
    for shapes, gap in ((IRREGULAR, 0.0), (LARGE, GAP_OF_LARGE)):
        for name, shape in shapes.items():
            buffers = tuple(
                Buffer(id=str(i), start=start, end=end, nbytes=nbytes)
                for i, (start, end, nbytes) in enumerate(irregular_buffers(shape))
            )
            yield Case(name=name, problem=Problem(buffers=buffers), gap=gap)


def measure(case: Case, *, time_limit_s: float) -> dict[str, Any]:
    """One row: what was found, how far above the bound, in what time."""
    began = time.perf_counter()
    row: dict[str, Any] = {"name": case.name, "buffers": len(case.problem.buffers)}
    row["capacity_nbytes"] = case.problem.capacities.get(DEVICE)
    try:
        plan = solve(case.problem, time_limit_s=time_limit_s, gap=case.gap)
    except MemoError as error:
        return row | {"status": type(error).__name__, "wall_s": round(time.perf_counter() - began, 3)}
    wall_s = time.perf_counter() - began
    require_valid(plan)
    arena = plan.arena(DEVICE)
    return row | {
        "status": arena.status.value,
        "nbytes": arena.nbytes,
        "lower_bound_nbytes": arena.lower_bound_nbytes,
        "ratio": arena.nbytes / arena.lower_bound_nbytes,
        "method": arena.method,
        "wall_s": round(wall_s, 3),
    }


def hardware() -> dict[str, Any]:
    """The processor, as its maker calls it."""
    info = Path("/proc/cpuinfo").read_text(encoding="utf-8") if Path("/proc/cpuinfo").exists() else ""
    model = re.search(r"model name\s*:\s*(.*)", info)
    cpu = model[1] if model else platform.processor()
    return {"cpu": cpu, "cores": os.cpu_count(), "load_1m": round(os.getloadavg()[0], 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=ROOT / "data" / "dsa")
    parser.add_argument("--time-limit", default="60s")
    parser.add_argument("--only", default="", help="names that contain this")
    parser.add_argument("--no-write", action="store_true", help="print only")
    args = parser.parse_args()
    solve(Problem(buffers=(Buffer(id="0", start=0, end=1, nbytes=1),)))
    report = {"benchmark": "pack", "date": datetime.date.today().isoformat(), "hardware": hardware()}
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    report["commit"] = commit.stdout.strip() or None
    report["time_limit_s"] = parse_duration_s(args.time_limit)
    rows = []
    print(f"{'instance':24}{'buffers':>8}{'ratio':>9}{'time':>9}  status, method")
    for case in cases(args.folder):
        if args.only in case.name:
            row = measure(case, time_limit_s=report["time_limit_s"])
            rows.append(row)
            ratio = f"{row['ratio']:.5f}" if "ratio" in row else "-"
            words = f"{row['status']}, {row.get('method', '')}"
            print(f"{row['name']:24}{row['buffers']:>8,}{ratio:>9}{row['wall_s']:>7.2f} s  {words}", flush=True)
    if not args.no_write:
        number = 1
        while (path := ROOT / "results" / f"{report['date']}-pack-{number}.json").exists():
            number += 1
        path.write_text(json.dumps(report | {"rows": rows}, indent=1) + "\n", encoding="utf-8")
        print(f"Wrote {path.relative_to(ROOT.parent)}")


if __name__ == "__main__":
    main()
