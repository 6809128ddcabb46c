"""The strip above the timeline and the page on a phone, in headless Chromium.

Skipped where no Chromium is installed (Debian: `apt-get install chromium`); `.ci/browser` installs it for CI.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from report_page import domain, needs_browser, report_of

pytestmark = needs_browser


@pytest.fixture(scope="module")
def report(synthetic: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("overview")
    synthetic.write(folder / "trace.rank0.jsonl", synthetic.Workload(layers=12, late_layer=7))
    return report_of(folder, [folder / "trace.rank0.jsonl"])[0]


def test_the_zoom_buttons(report: Path, open_page: Callable[..., Any]) -> None:
    page = open_page(report)
    first = domain(page)
    page.click("#zoom-in")
    near = domain(page)
    assert near[1] - near[0] == pytest.approx((first[1] - first[0]) / 1.6)
    page.click("#zoom-out")
    assert domain(page) == pytest.approx(first)
    page.click("#zoom-fit")
    whole = domain(page)
    assert whole[0] < first[0]
    assert whole[1] > first[1]


def test_the_visible_part_of_the_overview_is_dragged(report: Path, open_page: Callable[..., Any]) -> None:
    page = open_page(report)
    first = domain(page)
    strip = page.locator("canvas.whole")
    box, shown = strip.bounding_box(), strip.evaluate("canvas => ({...canvas.dataset})")
    middle = box["x"] + (float(shown["left"]) + float(shown["right"])) / 2
    page.mouse.move(middle, box["y"] + 13)
    page.mouse.down()
    page.mouse.move(middle + 40, box["y"] + 13)
    page.mouse.up()
    moved = domain(page)
    assert moved[0] > first[0]
    assert moved[1] - moved[0] == pytest.approx(first[1] - first[0])
    assert float(strip.get_attribute("data-left")) == pytest.approx(float(shown["left"]) + 40, abs=1)


def test_the_legend_names_the_phases(report: Path, open_page: Callable[..., Any]) -> None:
    text = open_page(report).locator("#legend .key").all_text_contents()
    assert text == ["forward", "backward", "optimizer", "recompute", "layers, first to last"]


def test_a_phone_shows_the_verdict_without_scrolling_sideways(report: Path, open_page: Callable[..., Any]) -> None:
    page = open_page(report, width=390, height=844)
    beyond = page.evaluate(
        "() => [...document.querySelectorAll('header *, .overview *, .timeline canvas')]"
        ".filter(e => e.getBoundingClientRect().right > innerWidth + 1).length"
    )
    assert beyond == 0
    lead = page.locator("#verdict .lead")
    assert lead.evaluate("e => e.scrollWidth <= e.clientWidth")
    assert lead.bounding_box()["y"] + lead.bounding_box()["height"] < 300
