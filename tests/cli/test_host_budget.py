"""A host budget above the machine's memory is refused by its flag, in one line; of a plan's budget counts what is there."""

from __future__ import annotations

from pathlib import Path

import pytest

from memo.cli.main import main
from memo.errors import ExitCode


@pytest.fixture(autouse=True)
def _little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("memo.manager.machine.total_host_bytes", lambda: 10 << 30)
    monkeypatch.setattr("memo.manager.machine.available_host_bytes", lambda **_: 4 << 30)


TINY = ["--model", "tiny", "--seq", "64", "--steps", "1", "--on", "cpu"]


@pytest.mark.parametrize(
    ("command", "said"),
    [
        (["train", *TINY, "--offload", "host"], "the machine's 10 GiB of memory; give --host 7GiB or less"),
        (
            ["rehearse", "--model", "llama-3.2-1b", "--seq", "1k", "--gpu", "h100", "--host-memory", "1GiB"],
            "the machine's 1 GiB of memory; give --host 716MiB or less",
        ),
    ],
)
def test_a_flag_above_the_memory_is_refused_before_anything_is_printed(
    command: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--host", "20GiB"]) == ExitCode.USAGE
    out, err = capsys.readouterr()
    assert not out
    assert err.splitlines()[-1] == f"memo {command[0]}: --host: 20 GiB is more than {said}"


def test_a_plan_for_a_machine_with_more_memory_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = str(tmp_path / "plan.json")
    asked = ["--seq", "1k", "--gpu", "h100", "--device", "40MiB", "--precision", "fp32", "-o", plan]
    assert main(["plan", "--model", "tiny", *asked]) == ExitCode.OK
    assert main(["train", "--plan", plan, "--steps", "1", "--on", "cpu"]) == ExitCode.OK
    (host,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("host ") and "MiB" in line)
    assert host.split()[3:5] == ["10", "GiB"]
