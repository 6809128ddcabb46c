"""The memory chart in headless Chromium: its top is what was measured, its peak is marked, a click lists the holders."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from report_page import domain, needs_browser, report_of

from memo.trace import build_report, device_stack, largest_holders, read_traces

pytestmark = needs_browser

LANES_PX = 96, 8  # left of the lanes and right of them, see Timeline


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, Any]]:
    """(trace, report, stats) of three real training steps on the CPU, with the lines that saved each tensor."""
    torch = pytest.importorskip("torch")
    from small_models import Stack

    import memo

    folder = tmp_path_factory.mktemp("trained")
    model = Stack(layers=4, hidden=64)
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(0, 61, (1, 256))
    trace = folder / "trace.rank0.jsonl"
    manager = memo.offload(model, alpha=1.0, min_bytes="1KiB", host="64MiB", trace=trace, trace_stacks=True)
    for _ in range(3):
        with manager:
            loss = model(ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        manager.step_done()
    manager.close()
    return trace, *report_of(folder, [trace])


def marked(page: Any) -> tuple[float, int]:
    domain(page)  # once it has been drawn
    t, nbytes = page.evaluate("() => document.querySelector('canvas.plot').dataset.peak").split()
    return float(t), int(nbytes)


def click_memory(page: Any, t: float) -> None:
    begin, end = domain(page)
    box = page.locator("canvas.plot").first.bounding_box()
    left, right = LANES_PX
    x = left + (t - begin) / (end - begin) * (box["width"] - left - right)
    y = page.evaluate("() => Number(document.querySelector('canvas.plot').dataset.memory)")
    page.mouse.click(box["x"] + x, box["y"] + y)


def test_the_top_of_the_chart_is_the_measured_total_of_each_step(
    trained: tuple[Path, Path, dict[str, Any]], open_page: Callable[..., Any]
) -> None:
    _, report, stats = trained
    page = open_page(report)
    for step in stats["ranks"][0]["steps"]:
        page.select_option("#step", str(step["step"]))
        device = next(peak for peak in step["peaks"] if peak["tier"] == "device")
        t, nbytes = marked(page)
        assert nbytes == device["measured_nbytes"] > device["saved_nbytes"]
        assert step["start_ns"] <= t <= step["start_ns"] + step["duration_ns"]


def test_a_click_on_the_peak_lists_its_ten_largest_holders(
    trained: tuple[Path, Path, dict[str, Any]], open_page: Callable[..., Any]
) -> None:
    trace, path, _ = trained
    page = open_page(path)
    t, _ = marked(page)
    click_memory(page, t)
    rows = page.locator("#holders tbody tr")
    one = build_report(read_traces([trace])).ranks[0]
    memory = device_stack(one.trace.events, one.lifetimes)
    expected = largest_holders(one.trace.events, one.lifetimes, memory, int(t))
    shown = [int(float(value)) for value in rows.evaluate_all("rows => rows.map(row => row.cells[0].dataset.value)")]
    assert shown == [holder.nbytes for holder in expected]
    assert len(shown) == 10
    texts = " ".join(rows.all_text_contents())
    for holder in expected:
        if holder.what == "saved":
            assert holder.op is not None
            assert f"{holder.op}, {holder.name}" in texts
            assert holder.line is not None
            assert holder.line.split(" < ")[0] in texts
            assert "small_models.py" in holder.line
    assert page.locator("#holders caption").text_content().startswith("Largest holders of ")
    saved = next(place for place, holder in enumerate(expected) if holder.what == "saved")
    rows.nth(saved).click()
    assert "Its life" in page.locator("#panel-body").inner_text()


def test_a_click_elsewhere_lists_that_instant_and_escape_clears_it(
    trained: tuple[Path, Path, dict[str, Any]], open_page: Callable[..., Any]
) -> None:
    page = open_page(trained[1])
    begin, end = domain(page)
    click_memory(page, begin + 0.2 * (end - begin))
    first = page.locator("#holders caption").text_content()
    click_memory(page, begin + 0.6 * (end - begin))
    assert page.locator("#holders caption").text_content() != first
    page.keyboard.press("f")  # no tensor to zoom to: nothing happens
    assert domain(page) == (begin, end)
    page.keyboard.press("Escape")
    assert page.locator("#holders").count() == 0
