"""Lines of code of each folder of the product, without docstrings, comments and blank lines: CONTRIBUTING.md's table.

python tests/support/lines_of_code.py    writes the table anew
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
TOPS = ("memo", "swap", "allocator", "mip", "kernels")
TABLE = ROOT / "CONTRIBUTING.md"
_ROW = re.compile(r"^\| `([^`]+)` \| ([\d,]+) \| (.*) \|$", re.MULTILINE)
_HEAD = "| folder | lines of code | why no fewer |"
_NOT_CODE = frozenset(
    {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
)


def lines_of_code() -> dict[str, int]:
    """Folder, relative to the root -> lines of code of its Python files."""
    lines: Counter[str] = Counter()
    for top in TOPS:
        for path in sorted((ROOT / top).rglob("*.py")):
            lines[str(path.parent.relative_to(ROOT))] += len(set(_code(path.read_text())))
    return dict(sorted(lines.items()))


def _code(source: str) -> Iterator[int]:
    docstrings = set(_docstrings(ast.parse(source)))
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NOT_CODE:
            yield from (line for line in range(token.start[0], token.end[0] + 1) if line not in docstrings)


def _docstrings(tree: ast.AST) -> Iterator[int]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield from range(node.lineno, (node.end_lineno or node.lineno) + 1)


def table_in(text: str) -> dict[str, int]:
    """The table's folders and lines, the row of the whole left out."""
    return {folder: int(lines.replace(",", "")) for folder, lines, _ in _ROW.findall(text) if folder != "all"}


def reasons_in(text: str) -> dict[str, str]:
    """Folder -> the last column of its row: why it has no fewer lines."""
    return {folder: why for folder, _, why in _ROW.findall(text) if folder != "all"}


def _table(lines: dict[str, int], reasons: dict[str, str]) -> str:
    rows = [
        f"| `{folder}` | {count:,} | {reasons.get(folder, '')} |"
        for folder, count in [*lines.items(), ("all", sum(lines.values()))]
    ]
    return "\n".join([_HEAD, "|---|---:|---|", *rows])


def main() -> None:
    """Writes the table into CONTRIBUTING.md, with the reasons that stand there."""
    text = TABLE.read_text()
    begin = text.index(_HEAD)
    end = text.index("\n\n", begin)
    TABLE.write_text(text[:begin] + _table(lines_of_code(), reasons_in(text)) + text[end:])


if __name__ == "__main__":
    main()
