"""Targets of citations and links exist: rules and orderings in docs/design.md, files and headings."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DESIGN = ROOT / "docs" / "design.md"
CITING = ["memo", "swap", "allocator", "mip", "kernels", "benchmarks", "examples", "docs", "tests"]
SUFFIXES = {".py", ".cpp", ".h", ".md"}
DOCUMENTS = sorted(
    [*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *(ROOT / "benchmarks").rglob("*.md"), *(ROOT / "tests").rglob("*.md")]
)

NUMBER = re.compile(r"\b[RE][1-9]\d?\b")
ENTRY = re.compile(r"^(?:\*\*|\| )([RE]\d+) ", re.MULTILINE)
CODE = re.compile(r"^ *```.*?^ *```|`[^`\n]*`", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.MULTILINE)


def cited(text: str) -> set[str]:
    """The numbers of rules and orderings in a text."""
    return set(NUMBER.findall(text))


def citing_files() -> Iterator[Path]:
    yield from ROOT.glob("*.md")
    for folder in CITING:
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in SUFFIXES and "node_modules" not in path.parts and path != Path(__file__):
                yield path


def anchors(text: str) -> set[str]:
    """The fragments that GitHub gives a document's headings."""
    found: set[str] = set()
    for heading in HEADING.findall(re.sub(r"^ *```.*?^ *```", "", text, flags=re.MULTILINE | re.DOTALL)):
        slug = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        found.add(next(name for n in range(len(found) + 1) if (name := f"{slug}-{n}" if n else slug) not in found))
    return found


def broken(document: Path, text: str) -> list[str]:
    """The relative links of a document behind which there is no file, or no such heading."""
    missing = []
    for link in LINK.findall(CODE.sub("", text)):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, fragment = link.partition("#")
        target = document.parent / name if name else document
        there = target.exists() and (not fragment or fragment in anchors(target.read_text(encoding="utf-8")))
        if not there:
            missing.append(link)
    return missing


NOTE = re.compile(r"Note \[[^\]\n]+\]")


def test_a_note_that_is_cited_is_written_once() -> None:
    """`Note [Its name].` or `:` begins it; anything else cites it."""
    written: list[str] = []
    cited_notes: set[str] = set()
    for top in ("memo", "swap", "allocator", "mip", "kernels"):
        for path in (ROOT / top).rglob("*.py"):
            text = path.read_text(encoding="utf-8")
            written += re.findall(rf"^(?: *# )?({NOTE.pattern})[.:] ", text, re.MULTILINE)
            cited_notes |= set(NOTE.findall(text))
    assert sorted(written) == sorted(cited_notes)


def test_every_rule_and_ordering_that_is_cited_has_one_entry_in_the_design() -> None:
    entries = ENTRY.findall(DESIGN.read_text(encoding="utf-8"))
    assert len(entries) == len(set(entries))
    for path in citing_files():
        unknown = cited(path.read_text(encoding="utf-8")) - set(entries)
        assert not unknown, f"{path.relative_to(ROOT)} cites {sorted(unknown)}, which docs/design.md does not have"


def test_every_rule_and_ordering_of_the_design_is_cited_where_it_is_kept() -> None:
    entries = set(ENTRY.findall(DESIGN.read_text(encoding="utf-8")))
    kept = {
        number for path in citing_files() if path.suffix == ".py" for number in cited(path.read_text(encoding="utf-8"))
    }
    assert entries <= kept, f"no code cites {sorted(entries - kept)}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_relative_link_leads_somewhere(document: Path) -> None:
    assert not broken(document, document.read_text(encoding="utf-8"))


def test_citations_and_links_are_told_from_what_looks_like_them() -> None:
    assert cited("(R5), rule R10, E2, E7; not E501, RE3, 3E4 or R0") == {"R5", "R10", "E2", "E7"}
    assert ENTRY.findall("**R5 A rule.** R6\n| E2 | an ordering |\n") == ["R5", "E2"]
    assert anchors("# Two `words`, one & none\n## Same\n## Same\n") == {"two-words-one--none", "same", "same-1"}
    text = "[a](design.md#rules) [b](none.md) [c](design.md#none) [d](#none) `[e](none.md)` [f](https://x.org/none)"
    assert broken(DESIGN, text) == ["none.md", "design.md#none", "#none"]


TEST = re.compile(r"`(tests/[\w/]+\.py)::(test_\w+)`")


def test_tests_that_are_named_in_full_are_there() -> None:
    """Names that end in an ellipsis, or have no path, are for readers alone."""
    named = TEST.findall((ROOT / "docs" / "faults.md").read_text(encoding="utf-8"))
    assert len(named) > 30
    missing = [
        f"{path}::{name}"
        for path, name in named
        if not (ROOT / path).exists() or f"def {name}(" not in (ROOT / path).read_text(encoding="utf-8")
    ]
    assert not missing
