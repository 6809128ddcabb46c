"""Result files: which one was written last."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.results import newest_result, write_result


def test_the_newest_file_may_have_been_written_on_the_day_after_its_date(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    assert newest_result("hunt") is None
    rows = (
        ("2026-11-24", "12:00:00", "12:30:00"),
        ("2026-11-25", "23:44:37", "00:15:10"),
        ("2026-11-25", "23:20:00", "23:39:35"),
    )
    for number, (date, begun, written) in enumerate(rows):
        body = {"benchmark": "hunt", "date": date, "begun": begun, "written": written}
        (tmp_path / f"{number}-hunt.json").write_text(json.dumps(body))
    newest = newest_result("hunt")
    assert newest is not None
    assert newest["written"] == "00:15:10"


def test_what_was_written_is_the_newest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    write_result("hunt", {"programs": 3})
    write_result("fuzz", {"programs": 4})
    newest = newest_result("hunt")
    assert newest is not None
    assert newest["programs"] == 3
