"""The waiting line: late, on standard error only, in place on a terminal and erased; rare and plain elsewhere."""

from __future__ import annotations

import io
import itertools
import json
import threading
import time
from typing import Any

import pytest

from memo.cli import train
from memo.cli.main import main
from memo.cli.terminal import progress
from memo.cli.terminal.progress import WaitingLine, due_times
from memo.errors import ExitCode
from memo.gpt.train.step import StepResult, Trainer


class Stream(io.StringIO):
    """Standard error that may be a terminal, and tells when it was written to."""

    def __init__(self, *, terminal: bool) -> None:
        super().__init__()
        self._terminal = terminal
        self.written = threading.Event()

    def isatty(self) -> bool:
        return self._terminal

    def flush(self) -> None:
        self.written.set()


@pytest.fixture
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TERMINAL_AFTER_S", "LOG_AFTER_S"):
        monkeypatch.setattr(progress, name, 0.0)


def test_two_seconds_on_a_terminal_and_ten_elsewhere_pass_before_the_first_line() -> None:
    assert list(itertools.islice(due_times(terminal=True), 3)) == [2.0, 3.0, 4.0]
    assert list(itertools.islice(due_times(terminal=False), 3)) == [10.0, 70.0, 130.0]
    assert list(itertools.islice(due_times(terminal=False, log_after_s=30.0), 3)) == [30.0, 90.0, 150.0]


def test_quick_work_writes_nothing() -> None:
    for terminal in (True, False):
        stream = Stream(terminal=terminal)
        with WaitingLine("memo plan", "solving", stream=stream):
            pass
        assert stream.getvalue() == ""


def test_a_terminal_shows_one_line_in_place_and_has_it_erased(at_once: None) -> None:
    stream = Stream(terminal=True)
    with WaitingLine("memo plan", "solving 7b at 1m", stream=stream):
        assert stream.written.wait(60)
    text = stream.getvalue()
    assert text.startswith("\r\x1b[Kmemo plan: solving 7b at 1m, 0 s")
    assert text.endswith("\r\x1b[K")
    assert "\n" not in text


def test_a_log_gets_whole_lines_that_stay(at_once: None) -> None:
    stream = Stream(terminal=False)
    with WaitingLine("memo plan", "solving 7b at 1m", stream=stream):
        assert stream.written.wait(60)
    assert stream.getvalue() == "memo plan: solving 7b at 1m, 0 s\n"


def test_json_keeps_a_log_free_of_lines(at_once: None) -> None:
    stream = Stream(terminal=False)
    with WaitingLine("memo plan", "solving", quiet=True, stream=stream):
        assert not stream.written.wait(0.05)
    assert stream.getvalue() == ""


def test_only_the_first_rank_writes(at_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    stream = Stream(terminal=True)
    with WaitingLine("memo doctor", "measuring", stream=stream):
        assert not stream.written.wait(0.05)
    assert stream.getvalue() == ""


def test_control_characters_of_a_name_do_not_reach_the_terminal(at_once: None) -> None:
    stream = Stream(terminal=True)
    with WaitingLine("memo plan", "solving \x1b]0;title\x07", stream=stream):
        assert stream.written.wait(60)
    assert "\x1b]0" not in stream.getvalue()


def test_an_error_leaves_the_line_erased(at_once: None) -> None:
    stream = Stream(terminal=True)

    def fail() -> None:
        with WaitingLine("memo plan", "solving", stream=stream):
            assert stream.written.wait(60)
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert stream.getvalue().endswith("\r\x1b[K")


def test_a_closed_standard_error_does_not_end_the_work(at_once: None) -> None:
    stream = Stream(terminal=True)
    line = WaitingLine("memo plan", "solving", stream=stream)
    stream.close()
    with line:
        line.say("simulating")


@pytest.mark.parametrize(
    "command",
    [
        ["record", "--model", "tiny", "--seq", "64", "--json"],
        ["pack", "step.csv", "--json"],
        ["doctor", "--json", "--seconds", "1ms"],
        ["profile", "--seq", "32", "--layers", "2", "--repeats", "1", "--json"],
    ],
    ids=lambda command: command[0],
)
def test_commands_show_it_on_a_terminal_and_keep_standard_output_whole(
    command: list[str],
    at_once: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: object,
) -> None:
    monkeypatch.chdir(str(tmp_path))
    with open("step.csv", "w") as file:
        file.write("id,lower,upper,size\n" + "".join(f"{n},{n},{n + 9},{n + 1}\n" for n in range(400)))
    stream = Stream(terminal=True)
    monkeypatch.setattr("sys.stderr", stream)
    assert main(command) == ExitCode.OK
    json.loads(capsys.readouterr().out)
    assert f"memo {command[0]}: " in stream.getvalue()
    assert stream.getvalue().endswith("\r\x1b[K")


def test_train_says_what_it_sets_up_and_ends_the_line_before_the_first_step_is_told(
    at_once: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []
    monkeypatch.setattr(WaitingLine, "say", lambda _, text: said.append(text))
    monkeypatch.setattr(WaitingLine, "end", lambda _: said.append(f"end {capsys.readouterr().out.count('loss')}"))
    small = ["--layers", "2", "--hidden", "32", "--heads", "2", "--seq", "32", "--steps", "1", "--on", "cpu"]
    assert main(["train", "--model", "tiny", *small]) == ExitCode.OK
    assert said[:4] == ["reading the data", "building the model", "running step 1 of 1", "end 0"]


def test_a_log_of_a_training_has_a_line_within_a_long_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, step = Stream(terminal=False), Trainer.step
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setattr(train, "FIRST_LINE_S", 0.0)
    monkeypatch.setattr(progress, "LOG_EVERY_S", 0.01)

    def long_step(trainer: Trainer, number: int, **keywords: Any) -> StepResult | None:
        deadline = time.monotonic() + 60
        while f"memo train: running step {number} of 1, " not in stream.getvalue():
            assert time.monotonic() < deadline, stream.getvalue()
            time.sleep(0.01)
        return step(trainer, number, **keywords)

    monkeypatch.setattr(Trainer, "step", long_step)
    small = ["--layers", "2", "--hidden", "32", "--heads", "2", "--seq", "32", "--steps", "1", "--on", "cpu"]
    assert main(["train", "--model", "tiny", *small]) == ExitCode.OK


def test_a_profile_without_room_is_refused_before_anything_is_built(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", "--model", "65b"]) == ExitCode.USAGE
    said = capsys.readouterr().err
    assert "a step of 65b at 1k needs 1012 GiB of host memory" in said
    assert "plan by arithmetic with memo plan --model 65b" in said
