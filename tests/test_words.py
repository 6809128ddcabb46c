"""A docstring has a subject of its own, and a class a name of its own."""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
SOURCES = [
    path for folder in ("memo", "swap", "allocator", "mip", "kernels") for path in sorted((ROOT / folder).rglob("*.py"))
]
FRAGMENT = re.compile(r"(Of|By|Those|The same|Likewise|As above)\b")


@functools.cache
def words() -> tuple[list[tuple[Path, int, str]], list[str]]:
    """Of each file lines and texts of the strings that stand alone; and the classes' names."""
    texts, classes = [], []
    for path in SOURCES:
        tree = ast.parse(path.read_text())
        classes += [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
        for node in ast.walk(tree):
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
                text = node.value.value
                texts += [(path, node.lineno, text.strip())] if isinstance(text, str) else []
    return texts, classes


def test_no_docstring_of_the_product_begins_with_a_fragment() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}: {text.partition('.')[0]}"
        for path, line, text in words()[0]
        if FRAGMENT.match(text)
    ]
    assert found == []


def test_each_name_is_of_one_class() -> None:
    counts = Counter(name for name in words()[1] if not name.startswith("_"))
    several = {name for name, count in counts.items() if count > 1}
    assert several == {"MemoCallback", "Options"}, "each framework's callback, and each command's options"
