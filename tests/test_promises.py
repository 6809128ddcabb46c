"""Each promise and rule of docs/design.md has tests marked with its number, and docs/promises.md names them."""

from __future__ import annotations

import ast
import collections
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
DESIGN, PROMISES = ROOT / "docs" / "design.md", ROOT / "docs" / "promises.md"
NUMBERED = re.compile(r"^(\d)\. \*\*|^\*\*(R\d+) ", re.MULTILINE)
ROW = re.compile(r"^\| ([PR]\d+) \| [^|]+ \| (.+) \|$", re.MULTILINE)


def promised() -> set[str]:
    """The four promises as P1 to P4, and the rules."""
    return {rule or f"P{promise}" for promise, rule in NUMBERED.findall(DESIGN.read_text())}


def marked() -> dict[str, set[str]]:
    """Promise -> tests whose marker names it."""
    found: collections.defaultdict[str, set[str]] = collections.defaultdict(set)
    for path in (ROOT / "tests").rglob("test_*.py"):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if "pytest.mark.promise(" in text else ():
            if not isinstance(node, ast.FunctionDef):
                continue
            for decorator in node.decorator_list:
                if isinstance(decorator, ast.Call) and ast.unparse(decorator.func) == "pytest.mark.promise":
                    for name in map(ast.literal_eval, decorator.args):
                        found[name].add(f"{path.relative_to(ROOT)}::{node.name}")
    return found


def test_each_promise_and_rule_has_its_tests_and_the_page_names_them() -> None:
    told = {name: set(re.findall(r"`([^`]+)`", tests)) for name, tests in ROW.findall(PROMISES.read_text())}
    assert marked() == told
    assert set(told) == promised()
    assert len(promised()) == 16
