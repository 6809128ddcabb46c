"""What the page lists, draws and leaves out, in headless Chromium: columns, lanes, charts, legends, paths, keys, search.

Skipped where no Chromium is installed (Debian: `apt-get install chromium`); `.ci/browser` installs it for CI.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from report_page import domain, needs_browser, pick, report_of

from memo.events import (
    CounterEvent,
    Lane,
    Note,
    Owned,
    Owner,
    Span,
    Stall,
    StallCause,
    StateChange,
    StepMark,
    TensorState,
    TierName,
)

pytestmark = needs_browser

MS, MIB = 1_000_000, 1 << 20
OTHER, WEIGHTS = 400 * MIB, 64 * MIB
LINES = "proj/model.py:41 forward < proj/train.py:9 main"
LIMITS = "all layers are alike, at alpha 0.125, which is the share that measured steps have room for on this device"


@pytest.fixture
def report(write_lines: Callable[..., Path]) -> Callable[..., Path]:
    """Writes the page of two steps; the first alone moves a tensor, to the disk."""

    def make(*, lines: bool = True, ops: bool = True, **header: Any) -> Path:
        events: list[Any] = []
        for step in range(2):
            t = step * 100 * MS
            events += [
                StepMark(t=t, step=step, phase="begin"),
                Owned(t=t, step=step, owner=Owner.WEIGHTS, nbytes=WEIGHTS),
                CounterEvent(t=t, step=step, tier=TierName.DEVICE, nbytes=OTHER + WEIGHTS),
                Span(t=t, d=20 * MS, step=step, lane=Lane.COMPUTE, module="layers.0", phase="forward"),
                Stall(t=t + 20 * MS, d=4 * MS, step=step, cause=StallCause.DRAIN, module="layers.0"),
                Span(t=t + 30 * MS, d=9 * MS, step=step, lane=Lane.NETWORK, module="layers.0", phase="forward"),
                Stall(t=t + 30 * MS, d=9 * MS, step=step, cause=StallCause.COLLECTIVE, module="layers.0"),
            ]
            for number, (op, shape) in enumerate((("NativeLayerNorm", (8, 512)), ("Mm", (8, 1024)))):
                key = 10 * step + number
                made = StateChange(
                    t=t + MS,
                    step=step,
                    id=key,
                    to=TensorState.LIVE,
                    nbytes=16 * MIB,
                    module="layers.0",
                    shape=shape if ops else None,
                    dtype="float32" if ops else None,
                    op=op if ops else None,
                    line=LINES if lines else None,
                )
                gone = StateChange(t=t + 90 * MS, step=step, id=key, to=TensorState.GONE, nbytes=16 * MIB)
                events += [made, gone]
            events.append(
                CounterEvent(t=t + 50 * MS, step=step, tier=TierName.DEVICE, nbytes=OTHER + WEIGHTS + 40 * MIB)
            )
            events.append(StepMark(t=t + 95 * MS, step=step, phase="end"))
        away = StateChange(t=40 * MS, step=0, id=0, to=TensorState.AWAY, nbytes=16 * MIB, tier=TierName.DISK)
        note = Note(t=5, step=0, cause="fallback", message="cannot open '/home/jane/scratch/x.bin'")
        limits = Note(t=6, step=0, cause="plan", message=LIMITS)
        path = write_lines(*events, away, note, limits, header=header)
        path.with_name("report.html").unlink(missing_ok=True)
        return report_of(path.parent, [path])[0]

    return make


def heads(page: Any, table: str) -> list[str]:
    found: list[str] = page.locator(f"{table} th").all_inner_texts()
    return found


def bands(page: Any) -> str:
    domain(page)  # once it has been drawn
    return str(page.locator("canvas.plot").get_attribute("aria-label"))


def caption(page: Any) -> str:
    domain(page)
    return str(page.locator("canvas.plot").get_attribute("data-device-caption"))


def test_tensor_lists_have_operation_and_shape_and_their_python_lines(
    report: Callable[..., Path], open_page: Callable[..., Any]
) -> None:
    page = open_page(report())
    page.click("#tab-tensors")
    assert heads(page, "#matches") == ["operation", "shape", "module", "bytes", "lived", "tier"]
    assert page.locator("#matches tbody tr.pick").first.locator("td").all_inner_texts()[:3] == [
        "NativeLayerNorm",
        "8×512 float32",
        "layers.0",
    ]
    assert page.locator("#matches tr.below").all_inner_texts() == [LINES, LINES]
    page.locator("#matches tr.below").last.click()
    assert "Mm" in page.locator("#panel-body").inner_text()
    page = open_page(report())
    pick(page, 120)
    assert heads(page, "#panel-body table:last-of-type") == ["operation", "shape", "module", "bytes", "lived", "tier"]


def test_columns_that_a_trace_has_not_are_left_out_and_stacks_are_named(
    report: Callable[..., Path], open_page: Callable[..., Any]
) -> None:
    page = open_page(report(lines=False, ops=False))
    page.click("#tab-tensors")
    assert heads(page, "#matches") == ["module", "bytes", "lived", "tier"]
    page = open_page(report(lines=False))
    page.click("#tab-tensors")
    assert page.locator("#matches tr.below").count() == 0
    assert "--trace-stacks" in page.locator("#panel-body").inner_text()


@pytest.mark.parametrize("width", [1280, 390])
def test_no_word_is_cut(report: Callable[..., Path], open_page: Callable[..., Any], width: int) -> None:
    names = {"model": "LlamaForCausalLM, 1,235,814,400 parameters", "hardware": "NVIDIA H100 80GB HBM3, 16 cores"}
    page = open_page(report(meta={**names, "command": "memo train " + "--checkpoint-every 10 " * 9}), width=width)
    assert f"{names['model']} · {names['hardware']}" in page.locator(".subtitle").inner_text()
    assert LIMITS in page.locator("#verdict").inner_text()
    for tab in ("tensors", "run", "figures", "stalls"):
        page.click(f"#tab-{tab}")
        cut = page.evaluate(
            """() => {
              const found = [];
              const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
              for (let node = walk.nextNode(); node; node = walk.nextNode()) {
                for (const { index, 0: word } of node.textContent.matchAll(/[^\\s×.,_/<]+/g)) {
                  const range = document.createRange();
                  range.setStart(node, index);
                  range.setEnd(node, index + word.length);
                  const lines = new Set([...range.getClientRects()].map((box) => Math.round(box.top)));
                  if (lines.size > 1) found.push(word);
                }
              }
              return found;
            }"""
        )
        assert cut == [], tab
    clipped = page.evaluate(
        "() => [...document.querySelectorAll('header *')].filter(one => one.scrollWidth > one.clientWidth + 1"
        " && getComputedStyle(one).overflowX !== 'visible' && one.tagName !== 'SELECT').map(one => one.className)"
    )
    assert clipped == []


def test_collectives_have_a_lane_and_a_list_of_their_own(
    report: Callable[..., Path], open_page: Callable[..., Any]
) -> None:
    page = open_page(report())
    assert "compute, stalls, collectives, network" in bands(page)
    page.click("#tab-stalls")
    assert [text.split(",")[0] for text in page.locator("#panel-body caption").all_inner_texts()] == [
        "1 stalls",
        "1 waits for collectives",
    ]
    page.click("#tab-selection")
    begin, end = domain(page)
    box = page.locator("canvas.plot").bounding_box()
    left, right = 96, 8  # pixels beside the lanes
    during = left + (134 * MS - begin) / (end - begin) * (box["width"] - left - right)  # a wait for a collective
    for below, waits in ((62, False), (81, True)):  # pixels: the middle of the lane of stalls, and of collectives
        page.keyboard.press("Escape")
        page.mouse.click(box["x"] + during, box["y"] + below)
        assert ("collective" in page.locator("#panel-body").inner_text()) == waits


def test_a_tier_that_is_empty_in_a_step_has_no_chart(
    report: Callable[..., Path], open_page: Callable[..., Any]
) -> None:
    page = open_page(report())
    page.select_option("#step", "1")
    assert bands(page).endswith("device memory, on disk empty in step 1")
    page.select_option("#step", "0")
    assert bands(page).endswith("device memory, on disk")
    page.select_option("#step", "")
    assert bands(page).endswith("device memory, on disk")


def test_other_memory_is_hidden_and_shown_by_button_and_key(
    report: Callable[..., Path], open_page: Callable[..., Any]
) -> None:
    page = open_page(report(meta={"budgets": {"device": 1 << 30}}))
    assert caption(page).startswith("peak 504 MiB; budget 1 GiB; other 400 MiB; weights 64 MiB")
    page.keyboard.press("o")
    assert caption(page).startswith("peak 104 MiB without other; weights 64 MiB")
    assert "budget" not in caption(page)
    assert page.locator("#other").get_attribute("aria-pressed") == "false"
    page.click("#other")
    assert caption(page).startswith("peak 504 MiB; ")


def test_a_phone_shows_the_whole_legend_and_every_chart(
    report: Callable[..., Path], open_page: Callable[..., Any]
) -> None:
    path = report(meta={"budgets": {"device": 1 << 30}})
    said = [caption(open_page(path, width=width, height=844)) for width in (1280, 390)]
    assert said[0] == said[1]
    assert said[0].count(";") == 5  # the peak, the budget, and four bands
    page = open_page(path, width=390, height=844)
    narrow = open_page(path, width=320, height=844)
    tops = [narrow.locator(one).bounding_box()["y"] for one in ("#step", "#search", "#theme", "#show-keys")]
    assert max(tops) - min(tops) < 10  # in one row
    page.select_option("#step", "0")
    assert "on disk" in bands(page)
    timeline = page.locator(".timeline")
    assert timeline.evaluate("one => one.scrollHeight <= one.clientHeight + 1")  # nothing of it needs a wheel
    assert (
        page.evaluate("() => { const m = document.querySelector('main'); m.scrollTop = 1e4; return m.scrollTop; }") > 0
    )
    box = page.locator(".panel").bounding_box()
    assert box["y"] + box["height"] <= 845


def test_the_run_panel_has_neither_empty_entries_nor_folders(
    report: Callable[..., Path], open_page: Callable[..., Any]
) -> None:
    meta = {"command": "/home/jane/env/bin/memo train --disk /mnt/jane/nvme", "plan": None, "budgets": {"disk": None}}
    path = report(meta=meta)
    page = open_page(path)
    page.click("#tab-run")
    text = page.locator("#panel-body").inner_text()
    assert "…/memo train --disk …/nvme" in text
    assert "cannot open '…/x.bin'" in text
    assert not {"plan", "budgets"} & set(text.splitlines())
    assert "jane" not in path.read_text(encoding="utf-8")
    assert str(path.parent) not in path.read_text(encoding="utf-8")


def test_a_question_mark_lists_the_keys(report: Callable[..., Path], open_page: Callable[..., Any]) -> None:
    page = open_page(report())
    dialog = page.locator("dialog#keys")
    assert not dialog.is_visible()
    page.keyboard.press("?")
    assert "zoom to the selection" in dialog.inner_text()
    shown = domain(page)
    page.keyboard.press("0")  # the page behind it stays as it is
    assert domain(page) == shown
    page.keyboard.press("Escape")
    assert not dialog.is_visible()
    page.click("#show-keys")
    page.keyboard.press("Enter")  # its button closes it, too
    assert not dialog.is_visible()


@pytest.mark.parametrize(
    ("query", "found"), [("mm", 1), ("8x1024", 1), ("8, 1024", 1), ("8×", 2), ("train.py:9", 2), ("layers.0", 2)]
)
def test_search_finds_operations_shapes_and_lines(
    report: Callable[..., Path], open_page: Callable[..., Any], query: str, found: int
) -> None:
    page = open_page(report())
    page.locator("#search").fill(query)
    assert page.locator("#matches caption").inner_text().startswith(f"{found} tensors match")
    page.keyboard.press("Enter")
    assert "Its life" in page.locator("#panel-body").inner_text()
