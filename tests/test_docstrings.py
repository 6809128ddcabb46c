"""Docstrings have a subject of their own: the line above is no part of the sentence."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
FRAGMENT = re.compile(r"(Of|By|Those|The same|Likewise|As above)\b")


def docstrings(path: Path) -> Iterator[tuple[int, str]]:
    """Lines and texts of the strings that stand alone."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value.strip()


def test_no_docstring_of_the_product_begins_with_a_fragment() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text.partition('.')[0]}"
        for folder in ("memo", "swap", "allocator", "mip", "kernels")
        for path in sorted((ROOT / folder).rglob("*.py"))
        for line, text in docstrings(path)
        if FRAGMENT.match(text)
    ]
    assert found == []
