"""`make matrix`: what cannot be tried is told in the row, and tests are counted as pytest reported them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.matrix import __main__ as matrix

REPORT = """<testsuites><testsuite>
<testcase classname="tests.one" name="test_good"/><testcase classname="tests.one" name="test_other"/>
<testcase classname="tests.two" name="test_bad"><failure message="no"/></testcase>
<testcase classname="tests.two" name="test_broken"><error message="no"/></testcase>
<testcase classname="tests.two" name="test_left_out"><skipped/></testcase>
</testsuite></testsuites>"""


def test_tests_are_counted_and_failures_are_named(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    names = ["tests.two.test_bad", "tests.two.test_broken"]
    assert matrix._counts(report) == {"passed": 2, "failed": 2, "skipped": 1, "failures": names}


def test_a_missing_interpreter_is_a_row_and_no_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(matrix, "CELLS", (matrix.Cell("2.99", "2.13.0", "newest"),))
    monkeypatch.setattr(sys, "argv", ["matrix"])
    assert matrix.main() == 0
    said = "Python 2.99, torch 2.13.0, transformers newest: not tried: no python2.99 on this machine\n"
    assert capsys.readouterr().out == said


def test_an_interpreter_is_found_and_a_failing_command_tells_its_last_line() -> None:
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    assert matrix._interpreter(version) is not None
    assert matrix._run([sys.executable, "-c", "import sys; sys.exit('first\\nlast')"]) == "last"
    assert not matrix._run([sys.executable, "-c", "print('fine')"])
