"""The sweep of rehearsals: cases are drawn alike every time, broken properties are seen, and it goes on where it stopped."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import rehearsals
from benchmarks.rehearsals import drawn, longest, longest_cases, summary, table, verdicts

ROW: dict[str, Any] = {
    "name": "a case",
    "model": "llama-3-8b",
    "tokens": [32768],
    "checkpoint_s": 7.4,
    "checkpoint_fits": True,
    "failure": None,
    "violations": [],
    "settled": True,
    "settled_s": 5.6,
    "near": 1.001,
    "soon": 1.7,
    "plans": 1,
}


def test_cases_are_drawn_alike_and_differ() -> None:
    cases = drawn(200)
    assert cases[:12] == drawn(12)
    assert len(set(map(str, cases))) > 190
    assert len({case.model for case in cases}) >= 12
    assert {case.gpu_gib for case in cases} == {24, 40, 80, 141}
    assert all(any(getattr(case, what) for case in cases) for what in ("lora", "disk", "logits"))
    assert any(case.accumulate > 1 for case in cases)
    assert any(len(case.tokens) > 1 for case in cases)


@pytest.mark.parametrize(
    ("change", "broken"),
    [
        ({}, set()),
        ({"failure": "an error"}, {"runs"}),
        ({"failure": "an error", "checkpoint_fits": False}, set()),
        ({"violations": ["device"]}, {"budgets"}),
        ({"settled_s": 7.5}, {"faster"}),
        ({"settled": False}, {"settles"}),
    ],
)
def test_a_broken_property_is_seen(change: dict[str, Any], broken: set[str]) -> None:
    row = ROW | change
    assert {name for name, holds in verdicts(row).items() if not holds} == broken
    found = summary([ROW, row])
    assert {name for name in ("runs", "budgets", "faster", "settles") if found[name] < 2} == broken


def test_an_error_of_a_case_is_counted_and_ends_no_summary() -> None:
    rows = [ROW, {"name": "another", "model": "llama-3-8b", "error": "took more than 420 s"}]
    assert summary(rows)["errors"] == 1
    assert "| llama-3-8b | 1 | 1 | 0 | 1.32 to 1.32, median 1.32 | 1.0010 |" in table(rows)


@pytest.mark.parametrize("most", [1024, 5000, 32768, 50000, 3 << 19])
def test_the_longest_sequence_that_fits_is_found_to_a_sixteenth(most: int) -> None:
    found = longest(lambda tokens: tokens <= most)
    assert found % 1024 == 0
    assert found <= most
    assert min(most, 1 << 20) - found < max(1024, found / 8)


def test_longest_cases_name_no_length() -> None:
    cases = longest_cases()
    assert {case.model for case in cases} == {
        name for name, (billions, *_) in rehearsals.MODELS.items() if billions < 34
    }
    assert all("longest" in str(case) for case in cases)


def test_cases_that_were_run_are_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = drawn(3)
    lines = tmp_path / "lines"
    lines.write_text("".join(json.dumps(ROW | {"name": str(case)}) + "\n" for case in cases))
    monkeypatch.setattr(rehearsals, "_import_all", lambda: None)
    monkeypatch.setattr(rehearsals, "_run_one", lambda case: pytest.fail("run again"))
    assert [row["name"] for row in rehearsals.run_all(cases, 1, lines)] == list(map(str, cases))
