"""Remakes README's picture and those of docs/trace.md, the viewer at 1280x720 on an imagined run, and of docs/simulate.md.

python -m benchmarks.screenshots
"""

from __future__ import annotations

import shutil
import tempfile
import time
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
            _choose_the_peak(page)
            _shoot(page, f"memory-{scheme}.png")
            if scheme == "light":
                _show_details(page)
        page = browser.new_page(viewport={"width": 1280, "height": 800}, color_scheme="light")
        page.goto(_simulated(Path(folder)).as_uri())
        page.wait_for_selector("html[data-ready]")
        _shoot(page, "simulated.png")
        page.goto(_compared(Path(folder)).as_uri())
        page.wait_for_selector("html[data-ready]")
        _shoot(page, "diff.png")
        phone = browser.new_page(viewport={"width": 390, "height": 1120}, color_scheme="light")
        phone.goto(report.as_uri())
        phone.wait_for_selector("html[data-ready]")
        _shoot(phone, "phone.png")
        readme = browser.new_page(viewport={"width": 1280, "height": 720}, color_scheme="light")
        readme.goto(_rehearsed(Path(folder)).as_uri())
        readme.wait_for_selector("html[data-ready]")
        _shoot(readme, "one-step.png")
        browser.close()


def _report(folder: Path) -> Path:
    traces = [folder / f"trace.rank{rank}.jsonl" for rank in range(2)]
    for rank, trace in enumerate(traces):
        write(trace, Workload(late_layer=17), rank=rank, world_size=2)
    assert memo(["trace", "html", *map(str, traces), "-o", str(folder / "report.html")]) == 0
    return folder / "report.html"


def _compared(folder: Path) -> Path:
    """The report's run beside one that recomputes more."""
    other, page = folder / "b.jsonl", folder / "diff.html"
    write(other, Workload(recompute_share=0.4))
    assert memo(["trace", "diff", str(folder / "trace.rank0.jsonl"), str(other), "-o", str(page)]) == 0
    return page


def _rehearsed(folder: Path) -> Path:
    """The step of README."""
    trace, page = str(folder / "rehearsed.jsonl"), folder / "rehearsed.html"
    asked = "--model llama-3-8b --lora 16 --layers 12 --seq 32k --loss-without-logits --gpu h100 --device 40GiB"
    assert memo(["rehearse", *asked.split(), "--trace", trace]) == 0
    assert memo(["trace", "html", trace, "-o", str(page)]) == 0
    return page


def _simulated(folder: Path) -> Path:
    """The step of docs/simulate.md."""
    plan, trace, page = (str(folder / name) for name in ("plan.json", "trace.jsonl", "simulated.html"))
    asked = "--model 7b --seq 1m --gpu a800 --gpus 8 --tp 8 --host 2TiB --device 80GiB"
    assert memo(["plan", *asked.split(), "-o", plan]) == 0
    assert memo(["simulate", plan, "-o", trace]) == 0
    assert memo(["trace", "html", trace, "-o", page]) == 0
    return Path(page)


def _choose_the_late_tensor(page: Any) -> None:
    page.locator("#search").fill("layers.17.input")
    page.keyboard.press("Enter")
    page.locator("#search").fill("")
    page.locator("#search").evaluate("search => search.blur()")


def _show_details(page: Any) -> None:
    """The tensors that a search by shape or operation finds, without other memory; the run; the keys."""
    page.keyboard.press("Escape")
    page.keyboard.press("o")
    page.locator("#search").fill("attention")
    _shoot(page, "tensors.png")
    page.keyboard.press("Escape")
    page.locator("#search").fill("")
    page.locator("#search").evaluate("search => search.blur()")
    page.keyboard.press("o")
    page.click("#tab-run")
    _shoot(page.locator(".panel"), "run.png")
    page.keyboard.press("?")
    _shoot(page.locator("#keys"), "keys.png")
    page.keyboard.press("Escape")


def _choose_the_peak(page: Any) -> None:
    """Clicks the device's memory at its peak, as the canvas says where it was drawn."""
    for key in ("Escape", "]", "["):  # the step again, and not the tensor's life
        page.keyboard.press(key)
    page.wait_for_timeout(300)
    data = page.evaluate("() => ({...document.querySelector('canvas.plot').dataset})")
    box = page.locator("canvas.plot").first.bounding_box()
    peak, begin, end = float(data["peak"].split()[0]), float(data["from"]), float(data["to"])
    left, right = 96, 8  # pixels beside the lanes
    x = left + (peak - begin) / (end - begin) * (box["width"] - left - right)
    page.mouse.click(box["x"] + x, box["y"] + float(data["memory"]))
    page.mouse.move(0, 0)


def _shoot(shown: Any, name: str) -> None:
    """Writes the picture of a page or of one of its elements, in 256 colours."""
    from PIL import Image

    time.sleep(0.3)
    shown.screenshot(path=str(DOCS / name))
    picture = Image.open(DOCS / name).convert("RGB")
    palette = picture.quantize(256, Image.Quantize.MAXCOVERAGE, kmeans=3, dither=Image.Dither.NONE)
    palette.save(DOCS / name, optimize=True)
    print(f"Wrote {DOCS / name}")


if __name__ == "__main__":
    main()
