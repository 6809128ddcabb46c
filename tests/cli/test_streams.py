"""The `memo` command with the streams that shells give it: read by nobody, full, closed, of few characters."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from memo.errors import ExitCode

STEP = Path(__file__).parents[1] / "mip" / "data" / "gptm_L4_ckpt.csv"
TRACE = '{"format": "memo-trace", "version": 1, "rank": 0, "world_size": 1, "origin_unix_ns": 5, "meta": {}}'
COMMANDS = {
    "overview": "--help",
    "argparse": "pack --help",
    "table": f"pack {STEP} --time-limit 1s",
    "trace": f"trace stats <(echo '{TRACE}')",
}


def shell(arguments: str, redirection: str, *, unbuffered: bool = False, **variables: str) -> tuple[int, str]:
    """The exit code of the command itself, and its standard error."""
    mode = "-u " if unbuffered else ""
    line = f"'{sys.executable}' {mode}-m memo.cli.main {arguments} {redirection}; exit ${{PIPESTATUS[0]}}"
    clean = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        ["bash", "-c", line], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env={**clean, **variables}
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("unbuffered", [False, True])
@pytest.mark.parametrize("arguments", COMMANDS.values(), ids=COMMANDS)
def test_a_pipe_that_nobody_reads_is_no_failure(arguments: str, unbuffered: bool) -> None:
    code, said = shell(arguments, "| true", unbuffered=unbuffered)
    assert code == ExitCode.OK
    assert "Error" not in said


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="Linux has /dev/full")
@pytest.mark.parametrize("arguments", [COMMANDS["overview"], COMMANDS["table"], COMMANDS["trace"]])
def test_a_full_disk_behind_standard_output_is_one_line(arguments: str) -> None:
    code, said = shell(arguments, "> /dev/full")
    assert code == ExitCode.FAILURE
    assert said.endswith("cannot write: No space left on device\n")
    assert "Traceback" not in said


@pytest.mark.parametrize("arguments", [COMMANDS["table"], COMMANDS["trace"]])
def test_closed_streams_are_done_without(arguments: str) -> None:
    assert shell(arguments, "<&- >&-")[0] == ExitCode.OK


def test_a_closed_standard_input_holds_no_problem() -> None:
    code, said = shell("pack", "<&-")
    assert code == ExitCode.FAILURE
    assert "is empty" in said


def test_a_terminal_of_few_characters_gets_question_marks() -> None:
    code, said = shell(COMMANDS["trace"], "> /dev/null", PYTHONIOENCODING="ascii")
    assert (code, said) == (ExitCode.OK, "")
