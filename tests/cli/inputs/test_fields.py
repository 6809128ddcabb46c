"""Flags from dataclasses."""

from __future__ import annotations

import argparse
import dataclasses
import enum
from collections.abc import Sequence
from typing import Annotated

import pytest

from memo.cli.inputs.fields import add_fields, is_given, parsed, refuse_given
from memo.cli.inputs.flag_types import Count, Flag, Force, Json, OutputFile, Size, Tokens
from memo.errors import UsageError


class Colour(enum.StrEnum):
    RED = "red"
    BLUE = "blue"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Base:
    what: Annotated[str, Flag(flags="what", metavar=None)]
    """What to do."""
    colour: Colour = Colour.RED
    """Colour of the thing: {names}."""
    seq: Annotated[Tokens, Flag(one_of="length")] = 1024
    """Sequence length (default 1k)."""
    longest: Annotated[bool, Flag(one_of="length")] = False
    """The longest."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options(Base):
    colour: Annotated[Colour, Flag(names=("red", "blue"))] = Colour.BLUE
    batch: Count = 1
    """Sequences, 10 % more."""
    device: Annotated[Size | None, Flag(metavar="BYTES")] = None
    """Memory."""
    parts: Annotated[Sequence[str], Flag(type=str, action="append")] = ()
    """Parts (default: all)."""
    output: OutputFile | None = None
    """Write it."""
    force: Force = False
    json: Json = False

    def __post_init__(self) -> None:
        if self.force:
            refuse_given(self, "--parts --json", "does not go with --force")


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(prog="it")
    add_fields(found, Options)
    return found


def options(*flags: str) -> Options:
    return parsed(Options, parser().parse_args(["do", *flags]))


def test_what_is_not_given_has_the_dataclass_s_default() -> None:
    assert options() == Options(what="do")


def test_a_value_is_of_the_field_s_type() -> None:
    given = options("--colour", "red", "--seq", "2k", "--device", "1GiB", "--parts", "a", "--parts", "b", "-o", "x")
    expected = Options(what="do", colour=Colour.RED, seq=2048, device=1 << 30, parts=["a", "b"], output="x")
    assert given == expected


def test_help_is_the_docstring_with_names_and_default() -> None:
    shown = " ".join(parser().format_help().split())
    for words in (
        "usage: it [-h] [--colour {red,blue}] [--seq TOKENS | --longest]",
        "what what to do",
        "colour of the thing: red, blue (default blue)",
        "--seq TOKENS sequence length (default 1k)",
        "sequences, 10 % more (default 1)",
        "--device BYTES memory",
        "-o FILE, --output FILE write it",
        "-f, --force overwrite existing files",
    ):
        assert words in shown


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--batch", "0"], "argument --batch: 0 is less than 1"),
        (["--batch", "x"], "argument --batch: cannot read 'x'"),
        (["--device", "8"], "argument --device: size: '8' can be read in several ways"),
        (["--colour", "green"], "argument --colour: 'green' is none of red, blue"),
        (["--seq", "8k", "--longest"], "argument --longest: not allowed with argument --seq"),
        (["-o", "-"], "argument -o/--output: '-' is not a file name"),
    ],
)
def test_a_value_that_is_none_is_refused_by_its_flag(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        options(*flags)
    assert words in capsys.readouterr().err


def test_zero_and_one_value_of_a_flag_are_told_from_none() -> None:
    args = argparse.Namespace(gpus="auto", host_memory=0, force=False, parts=(), output=None)
    given = [flag for flag in ("--gpus", "--gpus=auto", "--gpus=8", "--host-memory", "--force") if is_given(args, flag)]
    assert given == ["--gpus", "--gpus=auto", "--host-memory"]
    assert not is_given(args, "--parts")
    assert not is_given(args, "--output")


def test_the_first_flag_that_does_not_go_with_others_is_named() -> None:
    with pytest.raises(UsageError, match=r"^--json does not go with --force"):
        options("-f", "--json")
