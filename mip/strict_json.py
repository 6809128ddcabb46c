"""Files from anywhere, read strictly: bounded text, JSON without its traps, and dataclasses that hold exactly what they say.

Owns no format. Invariant: whatever the bytes are, the answer is a value of the asked type or a PlanError of one line;
the check of the values themselves is each dataclass's own.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import math
import os
import stat
import sys
import types
import typing
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from memo.errors import PlanError

__all__ = [
    "MAX_FILE_NBYTES",
    "MAX_TEXT",
    "STDIN",
    "decode",
    "encode",
    "parse_json",
    "read_as",
    "read_text",
    "require_format",
]

MAX_FILE_NBYTES = 32 << 20
STDIN = "-"
"""The path that means standard input."""
MAX_TEXT = 1000
MAX_WHOLE = 1 << 62

T = TypeVar("T")


def read_as(path: str | os.PathLike[str], understand: Callable[[str], T]) -> T:
    """What `understand` makes of a file's text, which raises a PlanError where it is not what it must be.

    Raises:
        PlanError: the same, or the file cannot be read; the message begins with the file's name.
    """
    name = os.fspath(path)
    shown = "standard input" if name == STDIN else repr(name)
    try:
        return understand(read_text(Path(path)))
    except PlanError as error:
        raise PlanError(f"{shown}: {error}") from None
    except OSError as error:
        raise PlanError(f"{shown}: cannot read: {error.strerror}") from None


def require_format(root: dict[str, Any], *formats: str, version: int) -> None:
    """Raises PlanError where the file says that it is something else, or of another version."""
    given = root.get("format")
    if given not in formats:
        said = "no format" if given is None else f"the format {str(given)[:80]!r}"
        raise PlanError(f"it names {said}, not {' or '.join(formats)}")
    if type(root.get("version")) is not int or root["version"] != version:
        raise PlanError(f"version is {str(root.get('version'))[:80]}; this program reads version {version}")


def read_text(path: Path) -> str:
    """The text of a regular file of at most 32 MiB, or of the standard input where the path is `-`.

    Raises:
        PlanError: it is something else, or empty. OSError: it cannot be read.
    """
    raw = _raw(path)
    if not raw.strip():
        raise PlanError("is empty")
    if len(raw) > MAX_FILE_NBYTES:
        raise PlanError(f"larger than {MAX_FILE_NBYTES >> 20} MiB")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PlanError(f"not UTF-8 text (byte {error.start})") from None


def _raw(path: Path) -> bytes:
    if str(path) == STDIN:
        return sys.stdin.buffer.read(MAX_FILE_NBYTES + 1)
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise PlanError("not a regular file")
        return file.read(MAX_FILE_NBYTES + 1)


def parse_json(text: str) -> dict[str, Any]:
    """The object in the text.

    Raises:
        PlanError: not JSON, no object, a repeated key, a number that is infinite or no number, too deep.
    """

    def refuse(word: str) -> None:
        raise PlanError(f"{word[:80]} is not a number of this format")

    def finite(word: str) -> float:
        if not math.isfinite(float(word)):
            refuse(word)
        return float(word)

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        entry = dict(pairs)
        if len(entry) != len(pairs):
            raise PlanError("a key appears twice in one object")
        return entry

    try:
        value = json.loads(text, parse_constant=refuse, parse_float=finite, object_pairs_hook=unique)
    except RecursionError:
        raise PlanError("nested too deeply") from None
    except PlanError:
        raise
    except ValueError as error:
        raise PlanError(f"not JSON: {str(error)[:120]}") from None
    if not isinstance(value, dict):
        raise PlanError("not a JSON object")
    return value


def encode(value: object) -> Any:
    """The JSON form of a dataclass: fields in their order, those that are None left out."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        held = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {name: encode(inner) for name, inner in held.items() if inner is not None}
    if isinstance(value, enum.Enum):
        return value.value
    return [encode(item) for item in value] if isinstance(value, tuple) else value


def decode(kind: type[T], value: object, where: str) -> T:
    """The dataclass of this JSON form.

    Raises:
        PlanError: an unknown, missing or mistyped key, or what the dataclass refuses; the message names the place.
    """
    if not isinstance(value, dict):
        raise PlanError(f"{where} is not an object")
    hints, fields = _hints(kind), {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for key in value:
        if key not in fields:
            raise PlanError(f"{where} has the unknown key {key[:80]!r}")
    given = {}
    for name, field in fields.items():
        if name in value:
            given[name] = _decode_any(hints[name], value[name], f"{where}: {name}")
        elif field.default is dataclasses.MISSING:
            raise PlanError(f"{where} has no {name}")
    return kind(**given)


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _decode_any(kind: Any, value: object, where: str) -> Any:
    if isinstance(kind, types.UnionType):  # something or None
        return None if value is None else _decode_any(kind.__args__[0], value, where)
    if typing.get_origin(kind) is tuple:
        if not isinstance(value, list):
            raise PlanError(f"{where} is not an array")
        (item, *_) = typing.get_args(kind)
        return tuple(_decode_any(item, entry, f"{where} {index}") for index, entry in enumerate(value))
    if dataclasses.is_dataclass(kind):
        return decode(kind, value, where)  # type: ignore[arg-type]
    if issubclass(kind, enum.Enum):
        if value not in [member.value for member in kind]:
            raise PlanError(
                f"{where} is {str(value)[:80]!r}, none of {', '.join(str(member.value) for member in kind)}"
            )
        return kind(value)
    return _decode_leaf(kind, value, where)


def _decode_leaf(kind: type, value: object, where: str) -> object:
    if kind is str:
        return _text_of(value, where)
    if isinstance(value, bool) or not isinstance(value, int if kind is int else (int, float)):
        raise PlanError(f"{where} is not a {'whole ' if kind is int else ''}number")
    assert isinstance(value, (int, float))
    if isinstance(value, int) and abs(value) > MAX_WHOLE:
        raise PlanError(f"{where} is not a number below 2^62")
    return value if kind is int else float(value)


def _text_of(value: object, where: str) -> str:
    if not isinstance(value, str) or len(value) > MAX_TEXT:
        raise PlanError(f"{where} is not a text of at most {MAX_TEXT} characters")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise PlanError(f"{where} is not valid Unicode") from None
    return value
