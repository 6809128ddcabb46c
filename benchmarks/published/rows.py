"""Rows of the published tables, and the half of them that the fit may see.

Owns the reading of a table and the choice of the half: by a hash of the row's text, so that nobody chooses.
"""

from __future__ import annotations

import csv
import dataclasses
import hashlib
from pathlib import Path

MOST = 10_000_000  # of anything that is counted
TABLES = Path(__file__).parent.parent / "data" / "published"
"""Copies of the published tables, each with its source in its first lines."""


class Inexpressible(Exception):
    """A row that is no run of a transformer as the arithmetic knows it; the message says why."""


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of a table."""

    text: str
    cells: dict[str, str]

    @property
    def fitted(self) -> bool:
        """Whether the row is in the half that rates are fitted on."""
        return hashlib.sha256(self.text.encode()).digest()[0] % 2 == 0

    def __getitem__(self, column: str) -> str:
        return self.cells.get(column) or ""

    def number(self, column: str, default: float | None = None) -> float:
        """The cell as a number; `default` where it is empty."""
        text = self[column].partition("#")[0].strip()
        if not text:
            if default is None:
                raise Inexpressible(f"no {column}")
            return float(default)
        try:
            return float(text)
        except ValueError:
            raise Inexpressible(f"{column} is {text[:40]!r}, no number") from None

    def count(self, column: str, default: int | None = None) -> int:
        """The cell as a whole number; `default` where it is empty."""
        number = self.number(column, default)
        if not (number.is_integer() and 0 <= number <= MOST):
            raise Inexpressible(f"{column} is {number:g}, no count up to {MOST:g}")
        return int(number)

    def flag(self, column: str) -> bool:
        """True for `true`, `True` and 1."""
        return self[column].lower() in ("true", "1", "1.0")


def read_rows(folder: Path, name: str) -> list[Row]:
    """Reads a table; none where the folder does not have it. Lines that begin with # are its source."""
    path = folder / name
    if not path.is_file():
        return []
    lines = [line for line in path.read_text().splitlines() if line.strip() and not line.startswith("#")]
    if not lines:
        return []
    names = next(csv.reader(lines[:1]))
    return [Row(text=line, cells=dict(zip(names, next(csv.reader([line])), strict=False))) for line in lines[1:]]
