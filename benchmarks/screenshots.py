"""Remakes the pictures of docs/trace.md: the viewer at 1280x720 in both themes, on an imagined run.

python -m benchmarks.screenshots
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.synthetic_trace import Workload, write
from benchmarks.viewer import FLAGS
from memo.cli.main import main as memo

DOCS = Path(__file__).parent.parent / "docs" / "images"


def main() -> None:
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        report = _report(Path(folder))
        chromium = shutil.which("chromium") or shutil.which("google-chrome")
        browser = driver.chromium.launch(executable_path=chromium, args=FLAGS)
        for scheme in ("light", "dark"):
            page = browser.new_page(viewport={"width": 1280, "height": 720}, color_scheme=scheme)
            page.goto(report.as_uri())
            page.wait_for_selector("html[data-ready]")
            _shoot(page, f"report-{scheme}.png")
            _choose_the_late_tensor(page)
            _shoot(page, f"tensor-{scheme}.png")
        browser.close()


def _report(folder: Path) -> Path:
    traces = [folder / f"trace.rank{rank}.jsonl" for rank in range(2)]
    for rank, trace in enumerate(traces):
        write(trace, Workload(late_layer=17), rank=rank, world_size=2)
    assert memo(["trace", "html", *map(str, traces), "-o", str(folder / "report.html")]) == 0
    return folder / "report.html"


def _choose_the_late_tensor(page: Any) -> None:
    page.locator("#search").fill("layers.17.input")
    page.keyboard.press("Enter")
    page.locator("#search").fill("")
    page.locator("#search").evaluate("search => search.blur()")


def _shoot(page: Any, name: str) -> None:
    page.wait_for_timeout(300)
    page.screenshot(path=str(DOCS / name))
    print(f"Wrote {DOCS / name}")


if __name__ == "__main__":
    main()
