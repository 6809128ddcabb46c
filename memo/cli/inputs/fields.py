"""Flags of the command line that are the fields of a dataclass: name, type, default and help are told once, there.

The type of a field may be annotated with keywords of argparse: `seq: Annotated[int, {"type": parse_tokens, ...}]`.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import enum
import functools
import inspect
import textwrap
import types
import typing
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from memo.errors import UsageError

_METAVARS: dict[Any, str] = {int: "N", float: "F", str: "NAME", Path: "FILE"}


def add_fields(
    group: argparse._ArgumentGroup,
    kind: type,
    names: str,
    *,
    flags: Mapping[str, str] | None = None,
    default: str | None = None,
) -> None:
    """Adds a flag for each of these fields; the value of one that is not given is None.

    Args:
        group: parser or group.
        kind: the dataclass. A field's docstring is the flag's help, with the default behind it.
        names: of the fields, separated by spaces.
        flags: of the fields whose flag is not `--` and the name.
        default: words for the default of all of them, instead of the dataclass's own.
    """
    hints, words = typing.get_type_hints(kind, include_extras=True), _docstrings(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    for name in names.split():
        field, kept = fields[name], fields[name].default
        keywords = _keywords(hints[name], kept)
        flag = (flags or {}).get(name, f"--{'no-' * (kept is True)}{name.replace('_', '-')}")
        shown = None if default is None else f"default: {default}"
        if shown is None and "(default" not in words[name] and not isinstance(kept, bool | None):
            shown = None if kept is dataclasses.MISSING else f"default {kept}"
        text = words[name] if shown is None else f"{words[name]} ({shown})"
        group.add_argument(flag, dest=field.name, default=None, help=text.replace("%", "%%"), **keywords)


def given_fields(args: argparse.Namespace, names: str) -> dict[str, Any]:
    """The values of flags that were given, by the fields' names.

    Args:
        args: the parsed flags.
        names: of the fields, separated by spaces.
    """
    return {name: value for name in names.split() if (value := getattr(args, name, None)) is not None}


def _keywords(hint: Any, default: object) -> dict[str, Any]:
    """Keywords of `add_argument` for a field of a type."""
    own: dict[str, Any] = {}
    if typing.get_origin(hint) is typing.Annotated:
        hint, own = typing.get_args(hint)
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        hint = next(each for each in typing.get_args(hint) if each is not type(None))
    if "type" in own:
        own = {**own, "type": _refusing(own["type"])}
    if hint is bool:
        return {"action": "store_false" if default is True else "store_true"}
    if typing.get_origin(hint) is Literal:
        return {"choices": typing.get_args(hint), **own}
    if isinstance(hint, type) and issubclass(hint, enum.StrEnum):
        return {"type": _refusing(functools.partial(_member, hint)), "metavar": f"{{{','.join(hint)}}}", **own}
    return {"type": hint, "metavar": _METAVARS.get(hint), **own}


def _member(kind: type[enum.StrEnum], text: str) -> enum.StrEnum:
    if text not in tuple(kind):
        raise UsageError(f"{text!r} is none of {', '.join(kind)}; choose one of them")
    return kind(text)


def _refusing(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """The parser for argparse, which shows the message of an ArgumentTypeError only."""

    def convert(text: str) -> Any:
        try:
            return parse(text)
        except UsageError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return convert


@functools.cache
def _docstrings(kind: type) -> dict[str, str]:
    """The docstrings of a dataclass's fields, as one line that begins small and has no full stop."""
    body = typing.cast("ast.ClassDef", ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]).body
    found = {}
    for field, below in pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            text = " ".join(str(below.value.value).split()).removesuffix(".")
            found[ast.unparse(field.target)] = text[0].lower() + text[1:] if text[1:2].islower() else text
    return found
