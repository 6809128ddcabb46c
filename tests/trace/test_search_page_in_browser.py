"""The page of `memo plan --search` in a real browser: its figures are the answer's, and clicks show what they say."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from report_page import needs_browser
from searched import HOSTILE, Searched, searched
from small_clusters import random_space

from memo.trace import render_page

pytestmark = needs_browser
OpenPage = Callable[..., Any]
ALL_POINTS, MOVING, ONE_GPU, TWO_NODES, EIGHT_GPUS = 11, 10, 1, 20, 21
"""Seeds of clusters: with planned, slower and unfit layouts; with bytes that move and split backwards; with one layout; and
two on which layouts leave GPUs idle or divide by everything."""


def page_of(folder: Path, seed: int) -> tuple[Path, Searched]:
    one = searched(random_space(seed), model=HOSTILE)
    path = folder / "search.html"
    path.write_text(render_page(one.page, title=HOSTILE, assets="search"), encoding="utf-8")
    return path, one


@pytest.fixture(scope="module")
def many(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Searched]:
    return page_of(tmp_path_factory.mktemp("many"), ALL_POINTS)


def numbers(page: Any, table: str) -> list[list[float]]:
    """Exact values of a table's cells that are numbers, row by row."""
    rows: list[list[float]] = page.evaluate(
        """id => [...document.querySelectorAll(`#${id} tbody tr`)].map(
             row => [...row.querySelectorAll('td.number')].map(cell => Number(cell.dataset.value)))""",
        table,
    )
    return rows


def terms(page: Any, which: str) -> dict[str, str]:
    found: dict[str, str] = page.evaluate(
        """id => Object.fromEntries([...document.querySelectorAll(`#${id} dt`)].map(
             one => [one.textContent, one.nextSibling.textContent]))""",
        which,
    )
    return found


@pytest.mark.parametrize("seed", [ALL_POINTS, MOVING, ONE_GPU])
@pytest.mark.parametrize(("scheme", "width"), [("light", 1280), ("dark", 390)])
def test_the_page_opens_wide_and_narrow_and_has_the_answer_s_figures(
    seed: int, scheme: str, width: int, tmp_path: Path, open_page: OpenPage
) -> None:
    path, one = page_of(tmp_path, seed)
    page = open_page(path, scheme=scheme, width=width)
    assert page.evaluate("document.documentElement.scrollWidth") == width
    entries = [*one.answer["best"], one.answer["runs"]][: len(one.shown)]
    assert numbers(page, "best") == [
        [
            entry["gpus"],
            entry["step_s"],
            entry["simulated_step_s"],
            entry["tokens_per_s"],
            entry["mfu_causal"],
            entry["time_s"]["bubble"],
            entry["time_s"]["communication"] + entry["time_s"]["reduction"],
            entry["memory"]["peak_bytes"],
        ]
        for entry in entries
    ]
    assert [row[0] for row in numbers(page, "why")] == [rival["slower_s"] for rival in one.answer["why"]]
    assert page.locator("h1").text_content().startswith("</script><b>model\\u202e at ")


@pytest.mark.parametrize("output", [None, "plan.json"])
def test_a_plan_that_was_not_written_stands_before_the_launch_line(
    output: str | None, many: tuple[Path, Searched], tmp_path: Path, open_page: OpenPage
) -> None:
    answer = many[1].page["search"] | {"launch": {"torchrun": "torchrun x", "slurm": None}, "output": output}
    path = tmp_path / "search.html"
    path.write_text(render_page(many[1].page | {"search": answer}, title="small", assets="search"), encoding="utf-8")
    text = open_page(path).locator("body").inner_text()
    assert ("No plan was written; add -o plan.json, then run:\n\ntorchrun x" in text) == (output is None)


def test_the_chart_has_a_mark_for_each_layout(many: tuple[Path, Searched], open_page: OpenPage) -> None:
    path, one = many
    page = open_page(path)
    marks = page.evaluate(
        "() => [...document.querySelectorAll('svg [data-s]')].map(one => [one.classList[0], Number(one.dataset.s)])"
    )
    points = one.answer["points"]
    wanted = [["best", planned.step_s] for planned, _ in one.shown]
    wanted += [["planned", point["step_s"]] for point in points if point["status"] == "planned"]
    wanted += [["slower", point["bound_s"]] for point in points if point["status"] == "slower"]
    assert sorted(marks) == sorted(wanted)
    assert {name for name, _ in wanted} == {"best", "planned", "slower"}
    misfits = [point for point in points if point["status"] == "does not fit"]
    assert len(page.locator("#misfits p").text_content().split("; ")) == len(misfits) > 0


def test_a_click_on_a_row_or_a_mark_draws_that_layout(many: tuple[Path, Searched], open_page: OpenPage) -> None:
    path, one = many
    page = open_page(path, width=390)
    for number, drawing in enumerate(one.page["drawn"]):
        page.locator("#best tbody tr").nth(number).click()
        headings = page.locator("h2").all_text_contents()
        assert sum(text.startswith(f"Number {number + 1}, ") for text in headings) == 3
        page.evaluate("() => document.querySelectorAll('details').forEach(one => { one.open = true; })")
        assert page.evaluate("document.documentElement.scrollWidth") == 390
        memory = [[*_used(stage, drawing), stage["memory"]["peak_bytes"]] for stage in drawing["stages"]]
        assert [row[:-1] for row in numbers(page, "memory")] == memory
        names = ("forward", "backward", "recompute", "stall", "communication", "idle", "optimizer")
        assert numbers(page, "stages") == [[stage["seconds"][name] for name in names] for stage in drawing["stages"]]
    page.locator("svg .best").first.scroll_into_view_if_needed()
    mark = page.locator("svg .best").first.bounding_box()
    page.mouse.click(mark["x"] + mark["width"] / 2, mark["y"] + mark["height"] / 2)
    assert page.locator("#best tr[aria-selected='true'] td").first.text_content() == "1"
    page.mouse.move(mark["x"] + 4, mark["y"] + 4)
    assert page.locator(".space .tip").text_content().startswith("number 1\nlayout: ")


def _used(stage: dict[str, Any], drawing: dict[str, Any]) -> list[int]:
    bytes_of = stage["memory"]["uses_bytes"]
    return [bytes_of[use] for use in bytes_of if any(one["memory"]["uses_bytes"][use] for one in drawing["stages"])]


@pytest.mark.parametrize("seed", [TWO_NODES, EIGHT_GPUS])
def test_a_click_on_a_rank_shows_its_groups(seed: int, tmp_path: Path, open_page: OpenPage) -> None:
    path, one = page_of(tmp_path, seed)
    page = open_page(path)
    for number, (planned, _) in enumerate(one.shown):
        page.locator("#best tbody tr").nth(number).click()
        shape = planned.candidate.shape
        rank = shape.gpus - 1
        page.locator(".gpus button").nth(rank).click()
        groups = terms(page, "rank-groups")
        stride = {"context parallelism": (shape.cp, shape.tp), "tensor parallelism": (shape.tp, 1)}
        stride |= {"same weights": (shape.dp * shape.cp, shape.tp), "pipeline": (shape.pp, shape.gpus // shape.pp)}
        for name, (size, step) in stride.items():
            assert (name in groups) == (size > 1)
            if size > 1:
                assert groups[name] == f"{size} ranks: {_ranges(range(rank - (size - 1) * step, rank + 1, step))}"
        assert page.locator(".gpus .self").text_content() == str(rank)
        marked = page.locator(".gpus button:not(.far)").count()
        assert marked == 1 + (shape.tp - 1) + (shape.dp * shape.cp - 1) + (shape.pp - 1)
        assert page.locator(".gpus .idle").count() == 8 - shape.gpus


def _ranges(ranks: range) -> str:
    return f"{ranks[0]} to {ranks[-1]}" if ranks.step == 1 and len(ranks) > 2 else ", ".join(map(str, ranks))


def test_buttons_zoom_the_timeline_and_the_wheel_scrolls_the_page(
    many: tuple[Path, Searched], open_page: OpenPage
) -> None:
    path, one = many
    page = open_page(path)

    def shown() -> tuple[float, float]:
        data = page.evaluate("() => ({...document.querySelector('canvas.plot').dataset})")
        return float(data["from"]), float(data["to"])

    step_ns = one.page["drawn"][0]["simulated_step_s"] * 1e9
    assert shown() == pytest.approx((0, step_ns))
    page.get_by_label("closer").click()
    closer = shown()
    assert closer[1] - closer[0] < 0.7 * step_ns
    box = page.locator("canvas.plot").bounding_box()
    page.mouse.move(box["x"] + 300, box["y"] + 30)
    before = page.evaluate("window.scrollY")
    page.mouse.wheel(0, -200)
    page.wait_for_function("before => window.scrollY < before", arg=before)
    assert shown() == closer
    page.get_by_label("whole step").click()
    assert shown() == pytest.approx((0, step_ns))
