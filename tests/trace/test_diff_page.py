"""The page of two runs: in words what changed, and in Chromium two steps that zoom together."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from report_page import needs_browser

from memo.cli.main import main
from memo.errors import ExitCode
from memo.trace import build_report, compare_reports, diff_page, diff_sentence, read_traces


@pytest.fixture
def runs(synthetic: ModuleType, tmp_path: Path) -> tuple[Path, Path]:
    """A run, and one that recomputes more and reloads late."""
    a, b = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    synthetic.write(a, synthetic.Workload(layers=6))
    synthetic.write(b, synthetic.Workload(layers=6, late_layer=3, recompute_share=0.4))
    return a, b


def sentence(a: Path, b: Path) -> str:
    return diff_sentence(compare_reports(*(build_report(read_traces([path])) for path in (a, b))))


def test_the_sentence_names_the_parts_that_moved_most(runs: tuple[Path, Path]) -> None:
    a, b = runs
    there, back = sentence(a, b), sentence(b, a)
    assert "longer than the first" in there
    assert "recompute +" in there
    assert "shorter than the first" in back
    assert "recompute -" in back
    assert sentence(a, a).startswith("Both steps took about as long")


def test_a_run_without_a_step_is_said(write_lines: Callable[..., Path], runs: tuple[Path, Path]) -> None:
    empty = write_lines()
    assert sentence(empty, runs[0]) == "One of the two runs has no finished step."


def test_the_command_writes_a_page_or_a_table(runs: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    a, b = map(str, runs)
    page = runs[0].with_name("diff.html")
    assert main(["trace", "diff", a, b]) == ExitCode.OK
    assert "longer than the first" in capsys.readouterr().out
    assert main(["trace", "diff", a, b, "-o", str(page)]) == ExitCode.OK
    assert main(["trace", "diff", a, b, "-o", str(page)]) != ExitCode.OK  # never over a file without -f
    assert main(["trace", "diff", a, b, "-o", str(page), "--json"]) == ExitCode.USAGE
    reports = [build_report(read_traces([path])) for path in runs]
    assert len(diff_page(*reports, compare_reports(*reports), names=(a, b))["pages"]) == 2


@needs_browser
def test_both_steps_zoom_together(runs: tuple[Path, Path], open_page: Callable[..., Any]) -> None:
    a, b = map(str, runs)
    path = runs[0].with_name("diff.html")
    assert main(["trace", "diff", a, b, "-o", str(path)]) == ExitCode.OK
    page = open_page(path)
    assert "longer than the first" in page.inner_text("#verdict")
    assert [text[:3] for text in page.locator(".caption").all_inner_texts()] == ["a: ", "b: "]
    assert page.locator("#figures tr.worse").count() > 2

    def shown() -> list[list[float]]:
        page.evaluate("() => new Promise(done => setTimeout(done, 150))")
        return page.evaluate(
            "() => [...document.querySelectorAll('canvas.plot')].map(one => [+one.dataset.from, +one.dataset.to])"
        )

    def widths(found: list[list[float]]) -> list[float]:
        return [to - begin for begin, to in found]

    whole = shown()
    assert widths(whole)[0] == pytest.approx(widths(whole)[1], rel=1e-3)  # one scale
    for number in (0, 1):
        page.locator("canvas.plot").nth(number).hover()
        page.mouse.wheel(0, -300)
        zoomed = shown()
        assert widths(zoomed)[0] == pytest.approx(widths(zoomed)[1], rel=1e-3)
        assert widths(zoomed)[0] < 0.9 * widths(whole)[0]
        offsets = [now[0] - before[0] for now, before in zip(zoomed, whole, strict=True)]
        assert offsets[0] == pytest.approx(offsets[1], rel=0.02, abs=1e4)
        page.keyboard.press("0")
        assert shown() == [pytest.approx(one, rel=1e-3) for one in whole]
