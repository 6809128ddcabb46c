"""Measures the address planner on folders of instances and on generated irregular traces; prints one table.

Each row is a cold `solve` in this process (the compiled engine is built before the first), by the clock and in processor
seconds. An instance whose name carries a capacity (A.1048576.csv) is solved at it, and C at its lower bound besides. Beside
it stands MiniMalloc's binary, if one is named, at the same capacity or at the size that the planner found. At the end the
planner runs beside a busy process per core, to see how it keeps its time limit. The result goes to benchmarks/results/
with the hardware and the commit.

The traces of idealloc and the instances G to K of MiniMalloc are not in this repository; name the folders that hold them:
github.com/cappadokes/idealloc, benchmarks/somas_tensors and benchmarks/iopddl; github.com/google/minimalloc,
benchmarks/challenging.

    python -m benchmarks.pack [FOLDER ...] [--time-limit 10s] [--only SUBSTRING] [--minimalloc BINARY] [--no-write]
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import multiprocessing
import os
import re
import resource
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.irregular_buffers import Shape, irregular_buffers, write
from benchmarks.results import write_result
from memo.errors import MemoError
from memo.mip.address.checker import require_valid
from memo.mip.address.files import read_problem
from memo.mip.address.problem import DEVICE, AddressProblem, Buffer
from memo.mip.address.solver import Progress, solve
from memo.units import parse_duration_s

DATA = Path(__file__).resolve().parent / "data" / "dsa"
MINIMALLOC_LIMIT_S = 30.0
MINIMALLOC_MOST = 2_000
"""Buffers of the largest instances that MiniMalloc is given."""
NEAR = 0.005
"""Excess over the bound whose time is taken: processor seconds until the placement was within it."""
LIMITS_S = (2.0, 5.0, 10.0)

GENERATED = {
    "irregular-300": Shape(layers=8, microbatches=1, seed=1),
    "irregular-600": Shape(layers=8, microbatches=2, seed=2),
    "irregular-2400": Shape(layers=16, microbatches=4, seed=3),
    "irregular-4800": Shape(layers=32, microbatches=4, in_flight=4, kv_heads=4, seed=4),
    "irregular-6000": Shape(
        layers=24, microbatches=6, in_flight=3, kv_heads=3, swapped=0.9, drain_bytes_per_tick=60_000_000, seed=13
    ),
    "irregular-7200": Shape(layers=48, microbatches=4, drain_bytes_per_tick=12_000_000, seed=5),
    "large-20000": Shape(layers=70, microbatches=8, drain_bytes_per_tick=60_000_000, swapped=0.9, seed=21),
    "large-20000-keep": Shape(layers=70, microbatches=8, drain_bytes_per_tick=60_000_000, swapped=0.3, seed=22),
    "large-24000-backlog": Shape(layers=80, microbatches=8, in_flight=3, seed=6),
    "large-60000": Shape(layers=96, microbatches=16, in_flight=4, seed=7),
}
NEVER_DONE = "large-24000-backlog"
"""An instance that uses up its time."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One row of the table."""

    name: str
    problem: AddressProblem


def cases(folders: Sequence[Path]) -> Iterator[Case]:
    """The folders' instances, then the generated ones."""
    for path in sorted((path for folder in folders for path in folder.glob("*.csv")), key=lambda path: path.name):
        problem = read_problem(path)
        named = re.fullmatch(r".*\.(\d+)", path.stem)
        if named:
            yield Case(name=path.stem, problem=dataclasses.replace(problem, capacities={DEVICE: int(named[1])}))
        if not named or path.stem.startswith("C."):
            yield Case(name=f"{path.stem.split('.')[0]}, smallest" if named else path.stem, problem=problem)
    for name in GENERATED:
        yield Case(name=name, problem=generated(name))


def generated(name: str) -> AddressProblem:
    """One of the generated traces."""
    lives = enumerate(irregular_buffers(GENERATED[name]))
    return AddressProblem(
        buffers=tuple(Buffer(id=str(i), start=a, end=b, nbytes=nbytes) for i, (a, b, nbytes) in lives)
    )


def measure(case: Case, *, time_limit_s: float) -> dict[str, Any]:
    """One row: what was found, how far above the bound, in what time."""
    capacity = case.problem.capacities.get(DEVICE)
    row: dict[str, Any] = {"name": case.name, "buffers": len(case.problem.buffers), "capacity_nbytes": capacity}
    began, began_cpu = time.perf_counter(), time.process_time()

    def times() -> dict[str, float]:
        wall_s, cpu_s = time.perf_counter() - began, time.process_time() - began_cpu
        return {"wall_s": round(wall_s, 3), "cpu_s": round(cpu_s, 3)}

    near_cpu_s = None

    def note(progress: Progress) -> None:
        nonlocal near_cpu_s
        if near_cpu_s is None and progress.nbytes and progress.nbytes <= progress.lower_bound_nbytes * (1 + NEAR):
            near_cpu_s = times()["cpu_s"]

    try:
        plan = solve(case.problem, time_limit_s=time_limit_s, progress=note)
    except MemoError as error:
        return row | {"status": type(error).__name__} | times()
    taken = times()
    require_valid(plan)
    arena = plan.arena(DEVICE)
    found = {"status": arena.status.value, "nbytes": arena.nbytes, "lower_bound_nbytes": arena.lower_bound_nbytes}
    return (
        row
        | found
        | {"ratio": arena.nbytes / arena.lower_bound_nbytes, "method": arena.method, "near_cpu_s": near_cpu_s}
        | taken
    )


def measure_minimalloc(binary: Path, case: Case, nbytes: int) -> float | None:
    """Processor seconds that MiniMalloc takes for this size; None if it finds nothing within its limit."""
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "in.csv"), Path(folder, "out.csv")
        write(source, [(buffer.start, buffer.end, buffer.nbytes) for buffer in case.problem.buffers])
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        command = [str(binary), f"--capacity={nbytes}", f"--input={source}", f"--output={target}"]
        try:
            done = subprocess.run(command, capture_output=True, timeout=MINIMALLOC_LIMIT_S, check=False)
        except subprocess.TimeoutExpired:
            return None
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        found = done.returncode == 0 and target.exists() and target.stat().st_size > 0
    return round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 3) if found else None


@contextlib.contextmanager
def busy(processes: int) -> Iterator[None]:
    """Processes that do nothing but compute."""
    spinning = [multiprocessing.Process(target=_spin, daemon=True) for _ in range(processes)]
    for process in spinning:
        process.start()
    try:
        yield
    finally:
        for process in spinning:
            process.kill()
            process.join()


def _spin() -> None:
    while True:
        pass


def measure_limits() -> list[dict[str, Any]]:
    """Seconds that `solve` takes for each time limit on an instance that uses it up, beside busy processes."""
    rows = []
    case = Case(name=NEVER_DONE, problem=generated(NEVER_DONE))
    processes = os.cpu_count() or 1
    for limit_s in LIMITS_S:
        with busy(processes):
            row = measure(case, time_limit_s=limit_s)
        rows.append({"name": case.name, "busy_processes": processes, "limit_s": limit_s, **row})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="*", type=Path, help="more instances than those of benchmarks/data/dsa")
    parser.add_argument("--time-limit", default="10s")
    parser.add_argument("--only", default="", help="names that contain this")
    parser.add_argument("--minimalloc", type=Path, metavar="BINARY", help="MiniMalloc's program, to run beside")
    parser.add_argument("--no-write", action="store_true", help="print only")
    args = parser.parse_args()
    for folder in args.folders:
        if not folder.is_dir():
            parser.error(f"{folder} is not a folder")
    if args.minimalloc and not os.access(args.minimalloc, os.X_OK):
        parser.error(f"--minimalloc: {args.minimalloc} is not a program")
    solve(AddressProblem(buffers=(Buffer(id="0", start=0, end=1, nbytes=1),)))
    report: dict[str, Any] = {"time_limit_s": parse_duration_s(args.time_limit), "load_1m": os.getloadavg()[0]}
    rows = []
    print(
        f"{'instance':24}{'buffers':>8}{'ratio':>9}{'wall':>9}{'CPU':>9}{'to 0.5%':>9}{'MiniMalloc':>12}  status, method"
    )
    for case in cases([DATA, *args.folders]):
        if args.only not in case.name:
            continue
        row = measure(case, time_limit_s=report["time_limit_s"])
        theirs = "-"
        if args.minimalloc and row["buffers"] <= MINIMALLOC_MOST and "nbytes" in row:
            row["minimalloc_cpu_s"] = measure_minimalloc(args.minimalloc, case, row["capacity_nbytes"] or row["nbytes"])
            theirs = "none" if row["minimalloc_cpu_s"] is None else f"{row['minimalloc_cpu_s']:.2f} s"
        rows.append(row)
        ratio = f"{row['ratio']:.5f}" if "ratio" in row else "-"
        words = f"{row['status']}, {row.get('method', '')}"
        near = "-" if row.get("near_cpu_s") is None else f"{row['near_cpu_s']:.2f} s"
        times = f"{row['wall_s']:>7.2f} s{row['cpu_s']:>7.2f} s{near:>9}{theirs:>12}"
        print(f"{row['name']:24}{row['buffers']:>8,}{ratio:>9}{times}  {words}", flush=True)
    limits = measure_limits() if args.only in NEVER_DONE else []
    for row in limits:
        print(f"limit {row['limit_s']:g} s beside {row['busy_processes']} busy processes: {row['wall_s']:.2f} s")
    if not args.no_write:
        print(f"Wrote {write_result('pack', report | {'rows': rows, 'limits': limits})}")


if __name__ == "__main__":
    main()
