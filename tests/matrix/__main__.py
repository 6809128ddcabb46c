"""Tests memo with the versions that people have: Python, torch and transformers, each combination in its own environment.

    python -m tests.matrix [--only 3.12] [--keep] [--write] [--pip ARGUMENTS]

Environments are made in build/matrix, each removed once it is tested; with torch for CUDA, as pip installs it by default,
one has 5 GB. Where an interpreter or a version is missing the row says so, and the others run. Exit 1 where a test failed.
"""

from __future__ import annotations

import argparse
import dataclasses
import glob
import os
import shlex
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from benchmarks.results import ROOT, write_result

WORK = ROOT / "build" / "matrix"
NEWEST = "newest"
TESTS = (
    "tests/manager",
    "tests/swap/engine",
    "tests/checkpointing",
    "tests/hugging_face",
    "tests/allocator",
    "tests/cli/test_plan_command.py",
    "tests/test_torch_private.py",
)
"""Offload and recompute bit for bit, models of transformers, the recorder, plans, and each private name of torch."""
TOOLS = ("pytest", "pytest-timeout", "pytest-xdist", "expecttest", "hypothesis", "accelerate")
LAST_LINES = 400


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
    """A combination of versions."""

    python: str
    torch: str
    transformers: str

    @property
    def name(self) -> str:
        """Name of its environment, and in --only."""
        return f"python-{self.python}-torch-{self.torch}-transformers-{self.transformers}"


CELLS = (
    Cell("3.11", "2.13.0", NEWEST),  # of constraints.txt
    Cell("3.11", "2.13.0", "4.57.6"),
    Cell("3.11", "2.11.0", NEWEST),
    Cell("3.11", "2.12.0", NEWEST),
    Cell("3.11", NEWEST, NEWEST),
    Cell("3.12", "2.11.0", "4.57.6"),
    Cell("3.12", "2.13.0", NEWEST),
    Cell("3.13", "2.13.0", NEWEST),
    Cell("3.14", NEWEST, NEWEST),
)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.matrix", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", metavar="TEXT", help="combinations whose name has this text, such as torch-2.11")
    parser.add_argument("--workers", type=int, default=2, help="processes that test (default 2)")
    parser.add_argument(
        "--pip", default="", metavar="ARGUMENTS", help="further arguments of pip install, such as an index"
    )
    parser.add_argument("--keep", action="store_true", help="keep the environments")
    parser.add_argument("--write", action="store_true", help="write a result file")
    args = parser.parse_args()
    rows = []
    for cell in CELLS:
        if args.only is None or args.only in cell.name:
            rows.append(_row(cell, pip=shlex.split(args.pip), workers=args.workers))
            print(_line(rows[-1]), flush=True)
            if not args.keep:
                shutil.rmtree(WORK / cell.name, ignore_errors=True)
    if args.write:
        print(f"Wrote {write_result('versions', {'tests': TESTS, 'rows': rows})}")
    return 1 if any(row["failed"] for row in rows) else 0


def _row(cell: Cell, *, pip: list[str], workers: int) -> dict[str, Any]:
    """Makes a combination's environment, tests in it, and says what was found."""
    row: dict[str, Any] = {
        **dataclasses.asdict(cell),
        "outcome": "",
        "passed": 0,
        "failed": 0,
        "skipped": 0,
        "failures": [],
    }
    folder = WORK / cell.name
    python = folder / "bin" / "python"
    if not (folder / "complete").exists():
        interpreter = _interpreter(cell.python)
        if interpreter is None:
            return {**row, "outcome": f"not tried: no python{cell.python} on this machine"}
        shutil.rmtree(folder, ignore_errors=True)
        install = [str(python), "-m", "pip", "install", "-q", *pip, *_wanted(cell)]
        why = _run([interpreter, "-m", "venv", "--upgrade-deps", str(folder)]) or _run(install)
        if why:
            return {**row, "outcome": f"not installed: {why}"}
        (folder / "complete").touch()
    row |= _versions(python)
    refused = _run([str(python), "-c", "import memo; memo.offload"])
    if refused:
        return {**row, "outcome": f"refused: {refused}"}
    begun = time.monotonic()
    report = folder / "report.xml"
    report.unlink(missing_ok=True)
    command = [
        str(python),
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        f"-n{workers}",
        f"--junitxml={report}",
        *TESTS,
    ]
    broken = _run(command)
    if not report.exists():
        return {**row, "outcome": f"no tests ran: {broken}", "failed": 1}
    return {**row, **_counts(report), "outcome": "tested", "seconds": round(time.monotonic() - begun)}


def _wanted(cell: Cell) -> list[str]:
    """What pip installs, memo itself among it."""
    pinned = [("torch", cell.torch), ("transformers", cell.transformers)]
    return ["-e", f"{ROOT}[data,plot]", *TOOLS, *(name if at == NEWEST else f"{name}=={at}" for name, at in pinned)]


def _interpreter(version: str) -> str | None:
    """Path of Python in this version: on the path, or one of pyenv's."""
    root = os.environ.get("PYENV_ROOT", os.path.expanduser("~/.pyenv"))
    others = sorted(glob.glob(f"{glob.escape(root)}/versions/*/bin/python{version}"))
    return next((path for path in (shutil.which(f"python{version}"), *others) if path and not _run([path, "-V"])), None)


def _versions(python: Path) -> dict[str, str]:
    """Versions that an environment has."""
    source = (
        "import platform, torch, transformers as t; print(platform.python_version(), torch.__version__, t.__version__)"
    )
    done = subprocess.run([python, "-c", source], capture_output=True, text=True, check=False)
    names = ("python", "torch", "transformers")
    return dict(zip(names, done.stdout.split(), strict=True)) if done.returncode == 0 else {}


def _run(command: list[str]) -> str:
    """Runs a command; returns the last line of what it printed if it failed, else nothing."""
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
    return "" if done.returncode == 0 else (lines[-1] if lines else f"exit code {done.returncode}")[:LAST_LINES]


def _counts(report: Path) -> dict[str, Any]:
    """Numbers of tests by outcome, and the names of those that failed."""
    cases = list(ElementTree.parse(report).iter("testcase"))
    failed = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    names = [f"{case.get('classname')}.{case.get('name')}" for case in failed]
    passed = len(cases) - len(failed) - skipped
    return {"passed": passed, "failed": len(failed), "skipped": skipped, "failures": names}


def _line(row: dict[str, Any]) -> str:
    versions = f"Python {row['python']}, torch {row['torch']}, transformers {row['transformers']}"
    if row["outcome"] != "tested":
        return f"{versions}: {row['outcome']}"
    counts = f"{versions}: {row['passed']} passed, {row['failed']} failed, {row['skipped']} skipped"
    return "\n  ".join([counts, *row["failures"]])


if __name__ == "__main__":
    sys.exit(main())
