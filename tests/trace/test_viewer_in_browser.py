"""The page in a real browser: headless Chromium opens a report from disk and a person's moves are made in it.

Skipped where no Chromium is installed (Debian: `apt-get install chromium`); `.ci/browser` installs it for CI.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from memo.cli.main import main
from memo.errors import ExitCode

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome") or shutil.which("chromium-browser")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium installed (apt-get install chromium)")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
LANE_Y = {"compute": 12, "stalls": 34}  # pixels below the axis, see Timeline.stack


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens a file; whatever the page logs, throws or asks of a network fails the test at its end."""
    troubles: list[str] = []
    contexts = []

    def open_(path: Path, *, scheme: str = "light", width: int = 1280, height: int = 720) -> Any:
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: troubles.append(f"console {message.type}: {message.text}"))
        page.on("pageerror", lambda error: troubles.append(f"error: {error}"))
        page.on("dialog", lambda dialog: (troubles.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda request: _expect_local(request.url, path, troubles))
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-ready]", timeout=20_000)
        return page

    yield open_
    for context in contexts:
        context.close()
    assert troubles == []


def _expect_local(url: str, path: Path, troubles: list[str]) -> None:
    if url != path.as_uri():
        troubles.append(f"request: {url}")


@pytest.fixture(scope="module")
def imagined(synthetic: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A report of two ranks and three steps with a late reload, and what stats --json says of it."""
    folder = tmp_path_factory.mktemp("imagined")
    traces = [folder / f"trace.rank{rank}.jsonl" for rank in range(2)]
    for rank, trace in enumerate(traces):
        synthetic.write(trace, synthetic.Workload(layers=12, late_layer=7), rank=rank, world_size=2)
    return _report(folder, traces)


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
    return _report(folder, sorted(folder.glob("trace.rank*.jsonl")))


def _report(folder: Path, traces: list[Path]) -> tuple[Path, dict[str, Any]]:
    from memo.trace.reader import read_traces
    from memo.trace.report import report_on

    page = folder / "report.html"
    assert main(["trace", "html", *map(str, traces), "-o", str(page)]) == ExitCode.OK
    return page, json.loads(json.dumps(report_on(read_traces(traces)).to_json()))


def domain(page: Any) -> tuple[float, float]:
    """The visible interval, once the frame that shows it has been drawn."""
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    shown = page.evaluate("() => ({...document.querySelector('canvas.plot').dataset})")
    return float(shown["from"]), float(shown["to"])


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


def pick(page: Any, pixels: int, *, lane: str = "compute") -> None:
    """Clicks a point of a lane, so many pixels from the left edge of the canvas."""
    box = page.locator("canvas.plot").first.bounding_box()
    page.mouse.click(box["x"] + pixels, box["y"] + 28 + LANE_Y[lane])


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
        assert row == [lane["lane"], lane["nbytes"], lane["bytes_per_s"], lane["link_bytes_per_s"]]
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


def test_a_trace_without_events_has_an_axis_of_a_microsecond(tmp_path: Path, open_page: Callable[..., Any]) -> None:
    trace = tmp_path / "trace.rank0.jsonl"
    header = {"format": "memo-trace", "version": 1, "rank": 0, "world_size": 1, "origin_unix_ns": 5, "meta": {}}
    trace.write_text(json.dumps(header) + "\n")
    assert main(["trace", "html", str(trace), "-o", str(tmp_path / "report.html")]) == ExitCode.OK
    begin, end = domain(open_page(tmp_path / "report.html"))
    assert end - begin == pytest.approx(1000, rel=0.1)


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
    _hold(page, "w")
    closer = domain(page)
    assert closer[1] - closer[0] < 0.8 * (first[1] - first[0])
    _hold(page, "d")
    right = domain(page)
    assert right[0] > closer[0]
    assert right[1] - right[0] == pytest.approx(closer[1] - closer[0], rel=1e-6)
    _hold(page, "a")
    assert domain(page)[0] < right[0]
    _hold(page, "s")
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


def _hold(page: Any, key: str) -> None:
    page.keyboard.down(key)
    time.sleep(0.25)
    page.keyboard.up(key)


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


def test_hostile_names_run_nothing(open_page: Callable[..., Any], tmp_path: Path) -> None:
    names = [
        "</script><script>alert(1)</script>",
        "<img src=x onerror=alert(1)>",
        "<!--<script>",
        "a\u2028\u2029b",
        "\u202egnp.exe",
        "__proto__",
        "constructor",
        "y" * 20_000,
        "SelfAttention.QKV",
    ]
    header = {"format": "memo-trace", "version": 1, "rank": 0, "world_size": 1, "origin_unix_ns": 5}
    lines: list[dict[str, Any]] = [
        header | {"meta": {name[:99]: {name[:99]: name} for name in names} | {"model": names[0]}}
    ]
    for i, name in enumerate(names):
        base = {"t": 10 * i, "step": 0}
        lines += [
            {"k": "state", **base, "id": i, "to": "live", "nbytes": 9, "module": name, "dtype": name},
            {"k": "span", **base, "d": 5, "lane": "compute", "module": name, "phase": "forward"},
            {"k": "span", **base, "d": 5, "lane": "d2h", "id": i, "nbytes": 9},
            {"k": "stall", **base, "d": 5, "cause": "drain", "module": name, "id": i},
            {"k": "note", **base, "cause": name, "message": name},
        ]
    trace = tmp_path / "t.jsonl"
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    path, _ = _report(tmp_path, [trace])
    page = open_page(path)
    for tab in ("stalls", "tensors", "figures", "run"):
        page.click(f"#tab-{tab}")
    page.click("#tab-tensors")
    for row in range(len(names)):
        page.click("#tab-tensors")
        page.locator("#matches tbody tr").nth(row).click()
        assert page.locator("#panel-body").text_content()
    page.locator("#search").fill("selfattention.qkv")
    assert page.locator("#matches caption").text_content().startswith("1 tensors match")
    assert page.evaluate("() => document.querySelectorAll('img, iframe, object, embed, link, a, svg').length") == 0
    assert page.evaluate("() => document.scripts.length") == 2  # the licences and the viewer; the data is taken out


def test_a_trace_of_nothing_opens(open_page: Callable[..., Any], tmp_path: Path) -> None:
    header = {"format": "memo-trace", "version": 1, "rank": 0, "world_size": 1, "origin_unix_ns": 5}
    trace = tmp_path / "t.jsonl"
    trace.write_text(json.dumps(header) + "\n")
    page = open_page(_report(tmp_path, [trace])[0])
    for tab in ("selection", "stalls", "tensors", "figures", "run"):
        page.click(f"#tab-{tab}")
    _hold(page, "w")
    domain(page)


@pytest.fixture(scope="module")
def packed(synthetic: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A report with an address plan: two arenas, a few rectangles on a grid."""
    from memo.mip.buffers import ArenaPlan, Buffer, Plan, Problem, Status
    from memo.trace.html import render_page
    from memo.trace.packing import packing_of
    from memo.trace.pagedata import page_data
    from memo.trace.reader import read_traces
    from memo.trace.report import report_on

    folder = tmp_path_factory.mktemp("packed")
    synthetic.write(folder / "t.jsonl", synthetic.Workload(layers=4, steps=2))
    grid = [(row, column) for row in range(4) for column in range(5)]
    device = [
        Buffer(id=f"layers.{row}.t{column}", start=column * 10, end=column * 10 + 10, nbytes=1 << 20)
        for row, column in grid
    ]
    host = [Buffer(id="</script>spilled", start=0, end=50, nbytes=4096, arena="host")]
    arenas = tuple(
        ArenaPlan(name=name, nbytes=nbytes, lower_bound_nbytes=nbytes, status=Status.OPTIMAL, method="order")
        for name, nbytes in (("device", 4 << 20), ("host", 4096))
    )
    offsets = (*(row << 20 for row, _ in grid), 0)
    plan = Plan(problem=Problem(buffers=(*device, *host)), offsets=offsets, arenas=arenas)
    data = page_data(report_on(read_traces([folder / "t.jsonl"])), packing=packing_of(plan, title="plan.json"))
    page = folder / "report.html"
    page.write_text(render_page(data, title="memo trace"))
    return page


def test_the_second_view_shows_the_address_plan(packed: Path, open_page: Callable[..., Any]) -> None:
    page = open_page(packed)
    page.click("#view-packing")
    facts = page.locator(".packing .body")
    assert "4 MiB" in facts.text_content()
    box = page.locator(".packing canvas").bounding_box()
    floor = box["height"] - 24
    y = floor - 3.5 / (4 * 1.02) * (floor - 10)  # 3.5 MiB up, in the fourth of four rows
    page.mouse.click(box["x"] + 72 + (box["width"] - 82) * 0.5, box["y"] + y)
    assert "layers.3.t2" in facts.text_content()  # half way across, in the third of five columns
    page.mouse.wheel(0, -200)
    page.select_option("#arena", "1")
    assert "4 KiB" in facts.text_content()
    page.mouse.click(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.click("#view-timeline")
    domain(page)


def test_a_thinned_page_says_so_and_still_draws(
    synthetic: ModuleType, open_page: Callable[..., Any], tmp_path: Path
) -> None:
    from memo.trace.html import render_page
    from memo.trace.pagedata import page_data
    from memo.trace.reader import read_traces
    from memo.trace.report import report_on

    synthetic.write(tmp_path / "t.jsonl", synthetic.Workload(layers=8, tensors=8, steps=3))
    data = page_data(report_on(read_traces([tmp_path / "t.jsonl"])), max_items=1000)
    path = tmp_path / "thin.html"
    path.write_text(render_page(data, title="memo trace"))
    page = open_page(path)
    assert "is thinned for drawing" in page.locator("#verdict .remark").text_content()
    pick(page, 300)
    domain(page)
