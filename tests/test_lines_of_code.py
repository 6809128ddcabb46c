"""The product weighs no more than CONTRIBUTING.md's table says, and docs/core.md tells what its files weigh."""

from __future__ import annotations

import re

from lines_of_code import ROOT, TABLE, lines_of_code, reasons_in, table_in

ROOM = 1.02
"""A folder may have so many times the lines of its row."""
FEW = 20
"""Lines that a small folder may have above its row."""


def test_no_folder_has_more_lines_of_code_than_its_row() -> None:
    allowed, lines = table_in(TABLE.read_text()), lines_of_code()
    assert lines.keys() == allowed.keys()
    heavier = {
        folder: count for folder, count in lines.items() if count > max(ROOM * allowed[folder], allowed[folder] + FEW)
    }
    assert heavier == {}, (
        "take as much away, or say in the change why python tests/support/lines_of_code.py writes more"
    )
    assert sum(lines.values()) <= ROOM * sum(allowed.values())


def test_each_row_says_why_it_has_no_fewer_lines() -> None:
    reasons = reasons_in(TABLE.read_text())
    assert reasons.keys() == lines_of_code().keys()
    assert [folder for folder, why in reasons.items() if not why] == []


def test_the_walk_through_the_core_tells_its_files_lengths() -> None:
    rows = re.findall(r"^\| `([\w/]+\.py)` \| (\d+) \|", (ROOT / "docs" / "core.md").read_text(), re.MULTILINE)
    assert len(rows) > 15
    lengths = {name: len((ROOT / name).read_text().splitlines()) for name, _ in rows}
    assert {name: said for name, said in rows if abs(int(said) - lengths[name]) > 0.1 * lengths[name]} == {}
