"""Dated result files: what was measured, on what, at which commit.

They lie under $OUT where that is set (a machine that is lent brings that folder back), else under benchmarks/results. A
process has one file for each name of results and replaces it whole each time that more is known, so what is cut off leaves
the rows before; it never takes the name of a file that another run left.
"""

from __future__ import annotations

import datetime
import functools
import itertools
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from memo.swap import total_host_bytes

ROOT = Path(__file__).parent.parent
"""The tree that runs."""


def quartiles(values: Sequence[float]) -> dict[str, float]:
    """Median, and half of the range between the quartiles as `spread`."""
    if len(values) < 2:
        return {"median": values[0], "spread": 0.0}
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": middle, "spread": (high - low) / 2}


def results_folder() -> Path:
    """Where result files and plots go; made if it is not there."""
    folder = Path(os.environ.get("OUT") or ROOT / "benchmarks" / "results")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def hardware() -> dict[str, Any]:
    """This machine, as far as results depend on it."""
    cpu = next(
        (
            line.partition(":")[2].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    return {"cpu": cpu, "cores": os.cpu_count(), "memory_bytes": total_host_bytes(), "kernel": platform.release()}


def commit() -> str:
    """The commit, with `+` when the tree differs from it; of an unpacked tree what its file COMMIT says."""
    packed = ROOT / "COMMIT"
    if packed.is_file():
        return packed.read_text().strip()
    try:
        head = _git("rev-parse", "--short=10", "HEAD")
        changed = _git("status", "--porcelain", "-uno")
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head + ("+" if changed else "")


def _git(*command: str) -> str:
    done = subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def write_result(name: str, body: dict[str, Any]) -> Path:
    """Writes what is known so far of the results called `name` and returns the file's path.

    Args:
        name: ends the file's name, behind the date and, where that is taken, the time of day.
        body: beside the date, the times of day (UTC) of the first and of the last writing, the commit and the hardware.
    """
    path, begun = _claim(results_folder(), name)
    written = f"{_now():%H:%M:%S}"
    times = {"date": begun.date().isoformat(), "begun": f"{begun:%H:%M:%S}", "written": written}
    head = {"benchmark": name, **times, "commit": commit(), "hardware": hardware()}
    unfinished = path.with_suffix(".json.part")
    unfinished.write_text(json.dumps({**head, **body}, indent=2) + "\n")
    unfinished.replace(path)
    return path


def newest_result(name: str, folder: Path | None = None) -> dict[str, Any] | None:
    """Content of the latest file of the results called `name`, in `results_folder()` or another one; None for none."""
    files = (folder or results_folder()).glob(f"*-{name}.json")
    bodies = [json.loads(path.read_text() or "{}") for path in files]
    written = [body for body in bodies if body.get("benchmark") == name]
    return max(written, key=_last_written, default=None)


def _last_written(body: dict[str, Any]) -> tuple[str, bool, str]:
    """When a file was written last, which may be on the day after its date."""
    return body["date"], body["written"] < body["begun"], body["written"]


@functools.cache
def _claim(folder: Path, name: str) -> tuple[Path, datetime.datetime]:
    """This process's file for `name`, which nobody had before, and when it was claimed."""
    now = _now()
    for stem in _stems(now, name):
        path = folder / f"{stem}.json"
        try:
            path.touch(exist_ok=False)
        except FileExistsError:
            continue
        return path, now
    raise AssertionError("names do not end")


def _stems(now: datetime.datetime, name: str) -> Iterator[str]:
    yield f"{now:%Y-%m-%d}-{name}"
    yield f"{now:%Y-%m-%d-%H%M%S}-{name}"
    for number in itertools.count(2):
        yield f"{now:%Y-%m-%d-%H%M%S}-{name}-{number}"


def _now() -> datetime.datetime:
    return datetime.datetime.now(tz=datetime.UTC)
