"""The page in a real browser: headless Chromium opens a report from disk and a person's moves are made in it.

Skipped where no Chromium is installed (Debian: `apt-get install chromium`); `.ci/browser` installs it for CI.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from report_page import domain, hold, needs_browser, pick, report_of

pytestmark = needs_browser


@pytest.fixture(scope="module")
def imagined(synthetic: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A report of two ranks and three steps with a late reload, and what stats --json says of it."""
    folder = tmp_path_factory.mktemp("imagined")
    traces = [folder / f"trace.rank{rank}.jsonl" for rank in range(2)]
    for rank, trace in enumerate(traces):
        synthetic.write(trace, synthetic.Workload(layers=12, late_layer=7), rank=rank, world_size=2)
    return report_of(folder, traces)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A report of three real training steps on the CPU."""
    torch = pytest.importorskip("torch")
    from small_models import Stack

    import memo

    folder = tmp_path_factory.mktemp("trained")
    torch.manual_seed(0)
    model = Stack(layers=4, hidden=64)
    ids = torch.randint(0, 61, (1, 256))
    manager = memo.offload(model, alpha=1.0, min_bytes="1KiB", host="64MiB", trace=folder)
    for _ in range(3):
        with manager:
            loss = model(ids)
        loss.backward()
        manager.step_done()
    manager.close()
    return report_of(folder, sorted(folder.glob("trace.rank*.jsonl")))


def figures(page: Any, table: str) -> list[list[float | str | None]]:
    """A figures table as the panel has it: exact values where there are such."""
    rows = page.evaluate(
        """id => [...document.querySelectorAll(`#${id} tbody tr`)].map(
             row => [...row.cells].map(cell => cell.dataset.value ?? cell.textContent))""",
        table,
    )
    return [[_exact(cell) for cell in row] for row in rows]


def _exact(cell: str) -> float | str | None:
    if cell == "null":
        return None
    try:
        return float(cell)
    except ValueError:
        return cell


def expected_times(step: dict[str, Any]) -> list[float | None]:
    names = ("duration_ns", "forward_ns", "backward_ns", "recompute_ns", "stall_ns", "added_percent", "overlap_percent")
    return [*(step[name] for name in names), step["prefetch"]["hit_percent"]]


@pytest.mark.parametrize("which", ["imagined", "trained"])
def test_the_panel_says_what_stats_says(
    which: str, open_page: Callable[..., Any], request: pytest.FixtureRequest
) -> None:
    path, stats = request.getfixturevalue(which)
    page = open_page(path)
    rank = next(one for one in stats["ranks"] if one["rank"] == stats["rank"])
    step = next(one for one in rank["steps"] if one["step"] == stats["step"])
    assert [row[1] for row in figures(page, "figures-time")] == expected_times(step)
    for row, lane in zip(figures(page, "figures-lanes"), step["lanes"], strict=True):
        assert row == [
            lane["lane"],
            *(lane[key] for key in ("nbytes", "bytes_per_s", "link_bytes_per_s", "queue_nbytes")),
        ]
    for row, peak in zip(figures(page, "figures-peaks"), step["peaks"], strict=True):
        assert row == [peak["tier"], peak["saved_nbytes"], peak["measured_nbytes"], peak["budget_nbytes"]]
    for row, stall in zip(figures(page, "figures-stalls"), step["stalls"], strict=True):
        assert row == [stall["cause"], stall["count"], stall["total_ns"], stall["longest_ns"]]
    said = page.locator("#verdict [data-rule]").all_text_contents()
    assert said == [sentence["text"] for sentence in step["verdict"]]


def test_a_narrow_window_shows_the_view_above_the_panel_and_nothing_beside_it(
    imagined: tuple[Path, dict[str, Any]], open_page: Callable[..., Any]
) -> None:
    page = open_page(imagined[0], width=390, height=844)
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    plot, panel = (page.locator(which).first.bounding_box() for which in (".timeline", ".panel"))
    assert plot["width"] == panel["width"] == 390
    assert plot["y"] + plot["height"] <= panel["y"] + 1
    assert min(plot["height"], panel["height"]) > 200


def test_rank_and_step_selectors_change_figures_verdict_and_view(
    imagined: tuple[Path, dict[str, Any]], open_page: Callable[..., Any]
) -> None:
    path, stats = imagined
    page = open_page(path)
    for rank in stats["ranks"]:
        page.select_option("#rank", str(rank["rank"]))
        for step in rank["steps"]:
            page.select_option("#step", str(step["step"]))
            assert [row[1] for row in figures(page, "figures-time")] == expected_times(step)
            assert page.locator("#verdict .lead").text_content() == step["verdict"][0]["text"]
            begin, end = domain(page)
            shift = 3_000_000 * rank["rank"]  # the imagined ranks begin so many ns apart
            middle = step["start_ns"] + step["duration_ns"] / 2 + shift
            assert (begin + end) / 2 == pytest.approx(middle, abs=1_000_000)
            assert end - begin < 1.05 * step["duration_ns"]
        page.select_option("#step", "")
        assert [row[1] for row in figures(page, "figures-time")] == expected_times(rank["total"])


def test_keys_wheel_and_drag_zoom_and_move(
    imagined: tuple[Path, dict[str, Any]], open_page: Callable[..., Any]
) -> None:
    page = open_page(imagined[0])
    first = domain(page)
    hold(page, "w")
    closer = domain(page)
    assert closer[1] - closer[0] < 0.8 * (first[1] - first[0])
    hold(page, "d")
    right = domain(page)
    assert right[0] > closer[0]
    assert right[1] - right[0] == pytest.approx(closer[1] - closer[0], rel=1e-6)
    hold(page, "a")
    assert domain(page)[0] < right[0]
    hold(page, "s")
    assert domain(page)[1] - domain(page)[0] > 1.2 * (right[1] - right[0])

    page.keyboard.press("0")
    whole = domain(page)
    box = page.locator("canvas.plot").first.bounding_box()
    page.mouse.move(box["x"] + 500, box["y"] + 100)
    page.mouse.wheel(0, -400)
    near = domain(page)
    assert near[1] - near[0] < whole[1] - whole[0]
    page.mouse.down()
    page.mouse.move(box["x"] + 300, box["y"] + 100, steps=4)
    page.mouse.up()
    assert domain(page)[0] > near[0]


def test_a_copy_tells_its_tensors_life(imagined: tuple[Path, dict[str, Any]], open_page: Callable[..., Any]) -> None:
    page = open_page(imagined[0])
    page.click("#tab-tensors")
    page.locator("#matches tbody tr").first.click()
    body = page.locator("#panel-body")
    text = body.text_content()
    for word in (
        "module",
        "layers.",
        "saved on the device",
        "copy out begins",
        "source dropped",
        "reload begins",
        "given back",
    ):
        assert word in text
    assert "d2h" in text
    assert "h2d" in text
    before = domain(page)
    page.keyboard.press("f")
    assert domain(page) != before


def test_a_click_on_a_layer_shows_its_span_and_tensors(
    imagined: tuple[Path, dict[str, Any]], open_page: Callable[..., Any]
) -> None:
    page = open_page(imagined[0])
    pick(page, 112)
    text = page.locator("#panel-body").text_content()
    assert "Span" in text
    assert "layers.0" in text
    assert "Its saved tensors" in text
    page.keyboard.press("Escape")
    assert "Click a block" in page.locator("#panel-body").text_content()


def test_the_stall_table_is_ranked_and_leads_to_the_stall(
    imagined: tuple[Path, dict[str, Any]], open_page: Callable[..., Any]
) -> None:
    page = open_page(imagined[0])
    page.click("#tab-stalls")
    waits = page.evaluate(
        "() => [...document.querySelectorAll('#panel-body td.number')].map(cell => Number(cell.dataset.value))"
    )
    assert waits == sorted(waits, reverse=True)
    page.locator("#panel-body tbody tr").first.click()
    begin, end = domain(page)
    assert end - begin == pytest.approx(3 * waits[0], rel=0.01)
    text = page.locator("#panel-body").text_content()
    assert "reload" in text
    assert "layers." in text


def test_search_lists_matches_and_enter_goes_to_the_next(
    imagined: tuple[Path, dict[str, Any]], open_page: Callable[..., Any]
) -> None:
    page = open_page(imagined[0])
    page.keyboard.press("/")
    page.keyboard.type("layers.7.MLP")
    caption = page.locator("#matches caption").text_content()
    assert caption.startswith("2 tensors match")
    page.keyboard.press("Enter")
    first = page.locator("#panel-body").text_content()
    assert "layers.7.mlp" in first
    page.keyboard.press("Enter")
    assert page.locator("#panel-body").text_content() != first
    page.locator("#search").fill("nothing is called so")
    assert page.locator("#matches").text_content().startswith("No tensors match")


def test_all_ranks_stand_below_each_other_and_scroll(
    imagined: tuple[Path, dict[str, Any]], open_page: Callable[..., Any]
) -> None:
    page = open_page(imagined[0])
    page.select_option("#rank", "all")
    assert page.evaluate(
        "() => { const t = document.querySelector('.timeline'); return t.scrollHeight >= t.clientHeight; }"
    )
    domain(page)


def test_the_run_panel_shows_where_the_trace_came_from(
    imagined: tuple[Path, dict[str, Any]], open_page: Callable[..., Any]
) -> None:
    page = open_page(imagined[0])
    page.click("#tab-run")
    text = page.locator("#panel-body").text_content()
    for word in ("memo train --model gpt-7b", "synthetic: 1 GPU", "2.13.0", "64 GiB", "fallback"):
        assert word in text


def test_both_themes_draw_and_the_button_switches(
    imagined: tuple[Path, dict[str, Any]], open_page: Callable[..., Any]
) -> None:
    colour = "() => getComputedStyle(document.body).backgroundColor"
    page = open_page(imagined[0], scheme="dark")
    assert page.evaluate(colour) == "rgb(20, 23, 28)"
    page.click("#theme")
    assert page.evaluate(colour) == "rgb(255, 255, 255)"


def test_nothing_lies_outside_the_window(imagined: tuple[Path, dict[str, Any]], open_page: Callable[..., Any]) -> None:
    page = open_page(imagined[0])
    outside = page.evaluate(
        """() => [...document.querySelectorAll('header *, .tabs *')].filter(one => {
             const box = one.getBoundingClientRect();
             return box.width > 0 && (box.right > innerWidth + 1 || box.left < -1);
           }).map(one => one.className || one.tagName)"""
    )
    assert outside == []
    assert page.evaluate("() => document.documentElement.scrollHeight") <= 720
