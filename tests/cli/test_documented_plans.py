"""Lines `memo plan ...` of the pages end in a plan."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from memo.cli.main import main
from memo.errors import ExitCode
from memo.hugging_face import PUBLISHED

ROOT = Path(__file__).parents[2]
LINE = re.compile(r"^    memo (plan [^#;\n]*)", re.MULTILINE)
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def documented() -> list[str]:
    """Flags of each line, without files to write and a report to read; searches, which take longer, are not among them."""
    lines = [line.strip() for page in PAGES for line in LINE.findall(page.read_text(encoding="utf-8"))]
    plain = {re.sub(r" (-o|--doctor) \S+", "", line) for line in lines if "--search" not in line}
    return sorted(plain)


@pytest.mark.parametrize("line", documented())
def test_a_documented_line_plans(
    line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if any(f"--model {name} " in line for name in PUBLISHED):
        pytest.importorskip("transformers")
    monkeypatch.chdir(ROOT)
    assert main(shlex.split(line)) == ExitCode.OK, capsys.readouterr().err
