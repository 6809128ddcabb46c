"""The page of a trace in a real browser: how tests open one and what a person does to it."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from memo.cli.main import main
from memo.errors import ExitCode

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium installed (apt-get install chromium)")
LANE_Y = {"compute": 12, "stalls": 34}  # pixels below the axis, see Timeline.stack


def report_of(folder: Path, traces: list[Path]) -> tuple[Path, dict[str, Any]]:
    from memo.trace import build_report, read_traces

    page = folder / "report.html"
    assert main(["trace", "html", *map(str, traces), "-o", str(page)]) == ExitCode.OK
    return page, json.loads(json.dumps(build_report(read_traces(traces)).to_json()))


def domain(page: Any) -> tuple[float, float]:
    """The visible interval, once the frame that shows it has been drawn."""
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    shown = page.evaluate("() => ({...document.querySelector('canvas.plot').dataset})")
    return float(shown["from"]), float(shown["to"])


def pick(page: Any, pixels: int, *, lane: str = "compute") -> None:
    """Clicks a point of a lane, so many pixels from the left edge of the canvas."""
    box = page.locator("canvas.plot").first.bounding_box()
    page.mouse.click(box["x"] + pixels, box["y"] + 28 + LANE_Y[lane])


def hold(page: Any, key: str) -> None:
    page.keyboard.down(key)
    time.sleep(0.25)
    page.keyboard.up(key)
