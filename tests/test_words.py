"""A docstring has a subject of its own, and a class a name of its own."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCES = [
    path for folder in ("memo", "swap", "allocator", "mip", "kernels") for path in sorted((ROOT / folder).rglob("*.py"))
]
FRAGMENT = re.compile(r"(Of|By|Those|The same|Likewise|As above)\b")


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Lines and texts of the strings that stand alone."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value.strip()


def test_no_docstring_of_the_product_begins_with_a_fragment() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text.partition('.')[0]}"
        for path in SOURCES
        for line, text in docstrings(path)
        if FRAGMENT.match(text)
    ]
    assert found == []


def test_each_name_is_of_one_class() -> None:
    counts = Counter(
        node.name
        for path in SOURCES
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, count in counts.items() if count > 1] == ["MemoCallback"], "each framework's callback"
