"""Dated result files: what was measured, on what, at which commit."""

from __future__ import annotations

import datetime
import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

__all__ = ["hardware", "write_result"]

FOLDER = Path(__file__).parent / "results"


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
    memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return {"cpu": cpu, "cores": os.cpu_count(), "memory_bytes": memory_bytes, "kernel": platform.release()}


def commit() -> str:
    """The commit, with `+` when the tree differs from it."""
    try:
        head = subprocess.run(["git", "rev-parse", "--short=10", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run(["git", "status", "--porcelain", "-uno"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return head.stdout.strip() + ("+" if changed.stdout.strip() else "")


def write_result(name: str, body: dict[str, Any]) -> Path:
    """Writes `benchmarks/results/{date}-{name}.json` and returns its path."""
    FOLDER.mkdir(exist_ok=True)
    today = datetime.datetime.now(tz=datetime.UTC).date().isoformat()
    path = FOLDER / f"{today}-{name}.json"
    head = {"benchmark": name, "date": today, "commit": commit(), "hardware": hardware()}
    path.write_text(json.dumps({**head, **body}, indent=2) + "\n")
    return path
