"""Speed of the trace viewer: a report of 200,000 events in headless Chromium, software rendering, two cores.

Prints a table and writes a dated result file. Panning and zooming hold a key down for some seconds, while the page
counts the frames in which its canvas was drawn anew.

    python -m benchmarks.viewer [--events 200000] [--out benchmarks/results]
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.synthetic_trace import Workload, write
from memo.cli.main import main as memo

SECONDS = 4.0
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

# A frame counts when the interval that the canvas shows is another one than a frame before.
COUNT_FRAMES = """seconds => new Promise(done => {
  const canvas = document.querySelector('canvas.plot');
  const began = performance.now();
  const gaps = [];
  let shown = canvas.dataset.from + canvas.dataset.to;
  let last = began;
  const frame = now => {
    const next = canvas.dataset.from + canvas.dataset.to;
    if (next !== shown) { gaps.push(now - last); last = now; shown = next; }
    if (now - began < seconds * 1000) requestAnimationFrame(frame);
    else done({frames: gaps.length, seconds: gaps.reduce((a, b) => a + b, 0) / 1000, worst_ms: Math.max(...gaps)});
  };
  requestAnimationFrame(frame);
})"""


def measure(report: Path) -> dict[str, Any]:
    from playwright.sync_api import sync_playwright

    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=chromium, args=FLAGS)
        page = browser.new_page(viewport={"width": 1280, "height": 720})
        began = time.monotonic()
        page.goto(report.as_uri())
        page.wait_for_selector("html[data-ready]", timeout=60_000)
        found: dict[str, Any] = {"load_s": time.monotonic() - began, "browser": f"Chromium {browser.version}"}
        page.keyboard.press("0")  # the whole trace: every event is visible
        time.sleep(0.3)
        box = page.locator("canvas.plot").first.bounding_box()
        assert box is not None
        found["drag_whole"] = _drag_zoomed_a_little(page, box)
        page.keyboard.press("0")
        found["zoom_in"] = _held(page, "w")
        found["pan_near"] = _held(page, "a")
        browser.close()
    return found


def _held(page: Any, key: str) -> dict[str, Any]:
    page.keyboard.down(key)
    counted = page.evaluate(COUNT_FRAMES, 1.0 if key == "w" else SECONDS)
    page.keyboard.up(key)
    return _rates(counted)


def _drag_zoomed_a_little(page: Any, box: dict[str, float]) -> dict[str, Any]:
    """Pans back and forth with nearly the whole trace in view, which is the dearest frame there is."""
    page.mouse.move(box["x"] + 500, box["y"] + 200)
    page.mouse.wheel(0, -250)
    time.sleep(0.3)
    page.evaluate(
        """() => { const step = now => { if (!window.stopPan) {
             dispatchEvent(new KeyboardEvent(Math.floor(now / 100) % 2 ? 'keydown' : 'keyup', {key: 'a'}));
             dispatchEvent(new KeyboardEvent(Math.floor(now / 100) % 2 ? 'keyup' : 'keydown', {key: 'd'}));
             requestAnimationFrame(step); } }; requestAnimationFrame(step); }"""
    )
    counted = page.evaluate(COUNT_FRAMES, SECONDS)
    page.evaluate("() => { window.stopPan = true; dispatchEvent(new Event('blur')); }")
    time.sleep(0.2)
    return _rates(counted)


def _rates(counted: dict[str, float]) -> dict[str, float]:
    return {
        "frames_per_s": round(counted["frames"] / counted["seconds"], 1),
        "worst_frame_ms": round(counted["worst_ms"], 1),
    }


def _hardware() -> dict[str, Any]:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    model = next((line.split(":")[1].strip() for line in lines if "model name" in line), platform.processor())
    return {"cpu": model, "cores": os.cpu_count(), "load_1min": round(os.getloadavg()[0], 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--events", type=int, default=200_000)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    workload = Workload(layers=48, tensors=40, steps=max(1, args.events // 18_700 + 1), tensor_nbytes=8_000_000)
    with tempfile.TemporaryDirectory() as folder:
        trace, report = Path(folder) / "t.jsonl", Path(folder) / "r.html"
        events = write(trace, workload)
        began = time.monotonic()
        assert memo(["trace", "html", str(trace), "-o", str(report)]) == 0
        written_s = time.monotonic() - began
        found = {"events": events, "report_nbytes": report.stat().st_size, "write_s": round(written_s, 2)}
        found |= measure(report)
    found["load_s"] = round(found["load_s"], 2)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    result = {
        "date": datetime.date.today().isoformat(),
        "commit": commit.stdout.strip(),
        "hardware": _hardware(),
        "what": "trace viewer in headless Chromium, software rendering, 1280x720",
        "result": found,
    }
    for name, value in found.items():
        print(f"{name:14} {value}")
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / f"{result['date']}-viewer.json"
    path.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
    print(f"Wrote {path}")


if __name__ == "__main__":
    main()
