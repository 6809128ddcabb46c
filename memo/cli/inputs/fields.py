"""Flags of the command line that are the fields of a dataclass: name, type, default and help are told once, there.

A field's docstring is the help of its flag. The type of a field may be annotated with keywords of argparse, as in
`seq: Annotated[int, {"type": parse_tokens}]`, and with three more:

flags     its names, separated by spaces, such as "-o --output"; one without dashes is a positional argument
names     words that replace {names} in the docstring
one_of    name of a group of flags that exclude one another
"""

from __future__ import annotations

import argparse
import ast
import collections
import dataclasses
import enum
import functools
import inspect
import sys
import types
import typing
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from memo.errors import UsageError

_Options = TypeVar("_Options")
_METAVARS: dict[Any, str] = {int: "N", float: "F", str: "NAME", Path: "FILE"}


def add_fields(
    group: argparse._ArgumentGroup | argparse.ArgumentParser,
    kind: type,
    names: str | None = None,
    *,
    flags: Mapping[str, str] | None = None,
    default: str | None = None,
) -> None:
    """Adds a flag for each of these fields; the value of one that is not given is None.

    Args:
        group: parser or group.
        kind: the dataclass. A field's docstring is the flag's help, with the default behind it.
        names: of the fields, separated by spaces; None: all fields.
        flags: of the fields whose flag is not `--` and the name.
        default: words for the default of all of them, instead of the dataclass's own.
    """
    hints, words = typing.get_type_hints(kind, include_extras=True), _docstrings(kind)
    fields = {field.name: field for field in dataclasses.fields(kind)}
    exclusive: dict[str, argparse._ArgumentGroup | argparse.ArgumentParser] = collections.defaultdict(
        group.add_mutually_exclusive_group
    )
    for name in fields if names is None else names.split():
        kept = fields[name].default
        flag = flag_of(f"no_{name}" if kept is True else name, flags)
        own = {"flags": flag, "help": words.get(name), **_keywords(hints[name], kept)}
        shown = None if default is None else f"default: {default}"
        if shown is None and "(default" not in own["help"] and not isinstance(kept, bool | None):
            shown = None if kept is dataclasses.MISSING else f"default {kept}"
        text = own.pop("help").replace("{names}", ", ".join(own.pop("names", ())))
        text = (text if shown is None else f"{text} ({shown})").replace("%", "%%")
        where = exclusive[own.pop("one_of")] if "one_of" in own else group
        called = own.pop("flags").split()
        own |= {"dest": name} if called[0].startswith("-") else {}
        where.add_argument(*called, default=None, help=text, **own)


def flag_of(name: str, flags: Mapping[str, str] | None = None) -> str:
    """The flag of a field: one of `flags`, or the name behind dashes."""
    return (flags or {}).get(name, f"--{name.replace('_', '-')}")


def given_fields(args: object, names: str) -> dict[str, Any]:
    """The values of flags that were given, by the fields' names.

    Args:
        args: the parsed flags.
        names: of the fields, separated by spaces.
    """
    return {name: value for name in names.split() if (value := getattr(args, name, None)) is not None}


def parsed(kind: type[_Options], args: argparse.Namespace) -> _Options:
    """The dataclass of the flags; a field whose flag was not given has its default.

    Raises:
        UsageError: flags do not go together.
    """
    return kind(**given_fields(args, " ".join(typing.get_type_hints(kind))))


def is_given(args: object, flag: str) -> bool:
    """Whether a flag was given, as `--flag`, or with one value, as `--flag=value`.

    Args:
        args: the parsed flags, or their dataclass; of a flag that was not given it has None, False or nothing in it.
        flag: the flag, which has the name of its field.
    """
    name, _, value = flag.removeprefix("--").partition("=")
    found = getattr(args, name.replace("-", "_"))
    return found == value if value else not (found is None or found is False or found == ())


def refuse_given(args: object, flags: str, why: str) -> None:
    """Refuses flags that do not go with the others.

    Args:
        args: as of `is_given`.
        flags: separated by spaces.
        why: end of the message.

    Raises:
        UsageError: one of the flags was given; of several the first is named.
    """
    for flag in flags.split():
        if is_given(args, flag):
            raise UsageError(f"{flag} {why}")


def _keywords(hint: Any, default: object) -> dict[str, Any]:
    """Keywords of `add_argument` for a field of a type."""
    own: dict[str, Any] = {}
    while typing.get_origin(hint) in (Annotated, typing.Union, types.UnionType):
        inner, *others = (each for each in typing.get_args(hint) if each is not type(None))
        if typing.get_origin(hint) is Annotated:
            own = dict(collections.ChainMap(own, *reversed(others)))  # the outer ones first
        hint = inner
    if "type" in own:
        own = {**own, "type": _refusing(own["type"])}
    if hint is bool:
        return {"action": "store_false" if default is True else "store_true", **own}
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
        except ValueError:
            raise argparse.ArgumentTypeError(f"cannot read {text!r}") from None

    return convert


def _docstrings(kind: type) -> dict[str, str]:
    """The docstrings of a dataclass's fields, its bases' too, as one line that begins small and has no full stop."""
    found = {}
    for base in filter(dataclasses.is_dataclass, reversed(kind.__mro__)):
        for field, below in pairwise(_classes(base.__module__)[base.__name__].body):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(below, ast.Expr)
                and isinstance(below.value, ast.Constant)
            ):
                text = " ".join(str(below.value.value).split()).removesuffix(".")
                found[ast.unparse(field.target)] = text[0].lower() + text[1:] if text[1:2].islower() else text
    return found


@functools.cache
def _classes(module: str) -> dict[str, ast.ClassDef]:
    """Classes of a module by name, as syntax trees."""
    tree = ast.parse(inspect.getsource(sys.modules[module]))
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef)}
