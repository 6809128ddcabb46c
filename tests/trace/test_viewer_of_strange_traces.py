"""Pages of unusual traces in a real browser: without events, with hostile names, with an address plan, thinned.

Skipped where no Chromium is installed (Debian: `apt-get install chromium`); `.ci/browser` installs it for CI.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from report_page import domain, hold, needs_browser, pick, report_of

from memo.cli.main import main
from memo.errors import ExitCode

pytestmark = needs_browser


def test_a_trace_without_events_has_an_axis_of_a_microsecond(tmp_path: Path, open_page: Callable[..., Any]) -> None:
    trace = tmp_path / "trace.rank0.jsonl"
    header = {"format": "memo-trace", "version": 1, "rank": 0, "world_size": 1, "origin_unix_ns": 5, "meta": {}}
    trace.write_text(json.dumps(header) + "\n")
    assert main(["trace", "html", str(trace), "-o", str(tmp_path / "report.html")]) == ExitCode.OK
    begin, end = domain(open_page(tmp_path / "report.html"))
    assert end - begin == pytest.approx(1000, rel=0.1)


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
    path, _ = report_of(tmp_path, [trace])
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
    page = open_page(report_of(tmp_path, [trace])[0])
    for tab in ("selection", "stalls", "tensors", "figures", "run"):
        page.click(f"#tab-{tab}")
    hold(page, "w")
    domain(page)


def test_the_page_of_an_address_plan_alone_shows_its_buffers(open_page: Callable[..., Any], tmp_path: Path) -> None:
    problem, path = tmp_path / "p.csv", tmp_path / "p.html"
    for rows, words in (("a,0,2,1024\nb,1,3,1024\n", "2 KiB"), ("", "nothing to place")):
        problem.write_text(f"id,lower,upper,size\n{rows}")
        assert main(["pack", str(problem), "--plot", str(path), "-f"]) == ExitCode.OK
        page = open_page(path)
        assert words in page.locator("#memo").text_content()
        if rows:
            box = page.locator(".packing canvas").bounding_box()
            page.mouse.click(box["x"] + box["width"] * 0.2, box["y"] + box["height"] * 0.7)
            assert "1 KiB" in page.locator(".packing .body").text_content()


def test_a_thinned_page_says_so_and_still_draws(
    synthetic: ModuleType, open_page: Callable[..., Any], tmp_path: Path
) -> None:
    from memo.trace import build_report, page_data, read_traces, render_page

    synthetic.write(tmp_path / "t.jsonl", synthetic.Workload(layers=8, tensors=8, steps=3))
    data = page_data(build_report(read_traces([tmp_path / "t.jsonl"])), max_items=1000)
    path = tmp_path / "thin.html"
    path.write_text(render_page(data, title="memo trace"))
    page = open_page(path)
    assert "is thinned for drawing" in page.locator("#verdict .remark").text_content()
    pick(page, 300)
    domain(page)
