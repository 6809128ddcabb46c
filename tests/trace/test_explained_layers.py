"""The page's view of layers: what `memo explain --json` says, in a browser, and files that say something else."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from report_page import needs_browser

from memo.cli.main import main
from memo.errors import ExitCode

KIND = {
    "layer": "layers.0",
    "layers": ["layers.0", "layers.1"],
    "module": "Block",
    "setting": "alpha 0",
    "refused": None,
    "saved_storages": 2,
    "saved_nbytes": 3072,
    "rows": [
        {
            "step": None,
            "operator": "hidden states",
            "shape": [4, 8],
            "dtype": "float32",
            "nbytes": 1024,
            "is_saved": True,
        }
        | {"fate": "moved", "why": "it was there before the layer", "replay_us": None},
        {"step": 0, "operator": "aten.<b>mm", "shape": [4, 16], "dtype": "float32", "nbytes": 2048, "is_saved": True}
        | {"fate": "replayed", "why": "backward needs it", "replay_us": 1500.0},
        {"step": 1, "operator": "aten.view", "shape": [16, 4], "dtype": "float32", "nbytes": 0, "is_saved": False}
        | {"fate": "view", "why": "", "replay_us": None},
    ],
    "points": [
        {"name": "attention", "kept_nbytes": 1024, "kept_fraction": 1 / 3, "replay_us": 1500.0}
        | {"replayed_steps": 1, "held_nbytes": 512, "is_used": True},
    ],
}
OTHER = KIND | {"layer": "layers.7", "layers": ["layers.7"], "module": "Sparse"}


@pytest.fixture
def trace(synthetic: ModuleType, tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    synthetic.write(path, synthetic.Workload(layers=4), rank=0, world_size=1)
    return path


def page_of(trace: Path, kinds: list[dict[str, Any]]) -> Path:
    given, page = trace.with_name("explain.json"), trace.with_name("page.html")
    given.write_text(json.dumps({"model": "tiny", "kinds": kinds}))
    assert main(["trace", "html", str(trace), "--explain", str(given), "-o", str(page)]) == ExitCode.OK
    return page


@needs_browser
def test_the_page_shows_each_kind_of_layer_operator_by_operator(trace: Path, open_page: Any) -> None:
    page = open_page(page_of(trace, [KIND, OTHER]))
    page.click("#view-explain")
    assert page.locator(".explain").is_visible()
    assert not page.locator(".work").is_visible()
    rows = page.locator(".explain table").nth(1).locator("tbody tr").all_inner_texts()
    assert [row.split("\t") for row in rows] == [
        ["before", "hidden states", "4 x 8 float32", "1 KiB", "yes", "moved", "", "it was there before the layer"],
        ["0", "aten.<b>mm", "4 x 16 float32", "2 KiB", "yes", "repeated", "1.5 ms", "backward needs it"],
    ]
    page.select_option("#explained", index=1)
    assert page.locator(".explain caption").first.inner_text() == "layers.7 (Sparse)"


@needs_browser
def test_a_page_without_explanations_has_no_such_view(trace: Path, open_page: Any) -> None:
    page = open_page(page_of(trace, []))
    assert page.locator("#view-explain").count() == 0


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"kinds": 3}', '{"kinds": [3]}', '{"kinds": [{"layer": "a"}]}'])
def test_what_memo_explain_did_not_print_is_refused(text: str, trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given, page = trace.with_name("explain.json"), trace.with_name("page.html")
    given.write_text(text)
    assert main(["trace", "html", str(trace), "--explain", str(given), "-o", str(page)]) == ExitCode.FAILURE
    assert "explain.json is not what memo explain --json prints" in capsys.readouterr().err
    assert not page.exists()
