"""Tables of data: what a table is like, and what the distributed ones may hold."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from memo.toml_tables import toml_tables

if TYPE_CHECKING:
    from pathlib import Path


def test_a_table_has_what_it_is_like_and_its_own(tmp_path: Path) -> None:
    (tmp_path / "data.toml").write_text(
        "[family.round]\nsides = 0\ncolour = { red = 1, blue = 2 }\n"
        '[ball]\nlike = "round"\ncolour = { blue = 3 }\n[globe]\nlike = "ball"\nsides = 1\n[box]\nsides = 6\n'
    )
    assert toml_tables(str(tmp_path / "code.py"), "data.toml") == {
        "ball": {"sides": 0, "colour": {"red": 1, "blue": 3}},
        "globe": {"sides": 1, "colour": {"red": 1, "blue": 3}},
        "box": {"sides": 6},
    }


def test_a_table_is_like_none_that_comes_later(tmp_path: Path) -> None:
    (tmp_path / "data.toml").write_text('[ball]\nlike = "box"\n[box]\nsides = 6\n')
    with pytest.raises(KeyError):
        toml_tables(str(tmp_path / "code.py"), "data.toml")
