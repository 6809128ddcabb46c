"""The help of every command begins with a short usage and an example that its parser takes."""

from __future__ import annotations

import importlib

import pytest

from memo.cli.main import COMMANDS, USAGE, WITH_SUBCOMMANDS, main
from memo.errors import ExitCode


def test_every_command_has_a_usage() -> None:
    assert {name.split()[0] for name in USAGE} == set(COMMANDS)


@pytest.mark.parametrize("name", USAGE)
def test_the_help_begins_with_a_short_usage_and_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*name.split(), "--help"]) == ExitCode.OK
    usage, example, empty, about = capsys.readouterr().out.splitlines()[:4]
    assert usage.startswith(f"usage: memo {name} ")
    assert usage.endswith(" [options]")
    assert example.startswith(f"example: memo {name} ")
    assert not empty
    assert about.endswith(".")


@pytest.mark.parametrize("name", USAGE)
def test_the_example_is_taken(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module(COMMANDS[name.split()[0]][0]), "run", lambda _: 0)
    assert main([*name.split(), *USAGE[name][1].split()]) == ExitCode.OK


def test_the_help_of_a_command_with_subcommands_lists_them(capsys: pytest.CaptureFixture[str]) -> None:
    for command in WITH_SUBCOMMANDS:
        assert main([command, "--help"]) == ExitCode.OK
        said = capsys.readouterr().out
        assert all(name.split()[1] in said for name in USAGE if name.startswith(f"{command} "))
