"""Strict reading and writing of versioned JSON documents: bounded text, no duplicate keys, dataclasses by their fields.

Every file format of `memo.mip` is read and written here; the formats themselves belong to the packages that define
them. Invariant: whatever the bytes are, the result is a value of the requested type or a PlanError of one line. The
range of a value is checked by its dataclass, in `__post_init__`.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import json
import os
import sys
import types
import typing
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

from memo.bounded_files import MAX_FILE_NBYTES, Refused, parse_object, read_bytes, shown_name, text_of
from memo.errors import PlanError

STDIN = "-"
"""The path that stands for standard input."""
MAX_TEXT = 1000
"""Characters of a string."""
MAX_INTEGER = 1 << 62

T = TypeVar("T")
Reader = Callable[[Any, str], Any]
"""(parsed JSON value, its place in the document for messages) -> the checked value."""


def read_as(path: str | os.PathLike[str], parse: Callable[[str], T]) -> T:
    """Reads a file and parses its text.

    Args:
        path: the file, or `-` for standard input.
        parse: turns the text into the result; raises PlanError where the text is not in the format.

    Raises:
        PlanError: from `parse`, or the file cannot be read; the message begins with the file's name.
    """
    name = os.fspath(path)
    shown = "standard input" if name == STDIN else shown_name(name)
    try:
        return parse(read_text(Path(path)))
    except (PlanError, Refused) as error:
        raise PlanError(f"{shown}: {error}") from None
    except OSError as error:
        raise PlanError(f"{shown}: cannot read: {error.strerror}") from None


def require_format(root: dict[str, Any], *formats: str, version: int | None = None) -> None:
    """Checks the `format` and `version` keys of a document; a version of None is not checked.

    Raises:
        PlanError: the format is none of `formats`, or the version is another.
    """
    given = root.get("format")
    if given not in formats:
        said = "no format" if given is None else f"the format {str(given)[:80]!r}"
        raise PlanError(f"it names {said}, not {' or '.join(formats)}")
    if version is not None and (type(root.get("version")) is not int or root["version"] != version):
        raise PlanError(f"version is {str(root.get('version'))[:80]}; this program reads version {version}")


def read_text(path: Path) -> str:
    """Reads the text of a regular file of at most 32 MiB, or of standard input for `-`.

    Raises:
        Refused: not a regular file, empty, too large, or not UTF-8.
        OSError: it cannot be read.
    """
    if str(path) != STDIN:
        return text_of(read_bytes(path))
    content = sys.stdin.buffer.read(MAX_FILE_NBYTES + 1)
    if len(content) > MAX_FILE_NBYTES:
        raise Refused(f"larger than {MAX_FILE_NBYTES >> 20} MiB")
    return text_of(content)


def parse_json(text: str) -> dict[str, Any]:
    """Parses a JSON document whose root is an object.

    Raises:
        PlanError: not JSON, not an object, a repeated key, an infinite number or NaN, or nested too deeply.
    """
    try:
        return parse_object(text)
    except Refused as error:
        raise PlanError(str(error)) from None


def write_json(name: str, version: int, entries: Mapping[str, Any]) -> str:
    """Writes a document: a key a line, and each item of an array of objects on a line of its own.

    Args:
        name: value of the `format` key.
        version: value of the `version` key.
        entries: the other keys, with values that are JSON already (`encode`).
    """
    lines = [f'"format": "{name}"', f'"version": {version}']
    lines += [f"{json.dumps(key)}: {_lines(value)}" for key, value in entries.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _lines(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return "[\n" + ",\n".join(json.dumps(item) for item in value) + "\n]"
    return json.dumps(value)


def encode(value: object) -> Any:
    """Converts a dataclass to JSON values: fields that are not None in their order, mappings by sorted key."""
    if value is None or isinstance(value, (int, float)):
        return value
    if isinstance(value, str):
        return str(value)  # the value of a StrEnum, too
    if isinstance(value, tuple):
        return [encode(item) for item in value]
    if isinstance(value, Mapping):
        return {key: encode(value[key]) for key in sorted(value)}
    values = ((name, getattr(value, name)) for name in value.__dataclass_fields__)  # type: ignore[attr-defined]
    return {name: encode(inner) for name, inner in values if inner is not None}


def decode(kind: type[T], value: object, where: str, *, ignore: Collection[str] = ()) -> T:
    """Converts a JSON object to a dataclass. Fields with a default may be missing.

    Args:
        kind: the dataclass; fields are str, bool, int, float, enums, literals, dataclasses, tuples, mappings by string,
            objects (any JSON value), or any of these or None.
        value: the parsed JSON value.
        where: its place in the document, for messages.
        ignore: keys that are allowed besides the fields and not read.

    Raises:
        PlanError: an unknown, missing or mistyped key, or a value that the dataclass refuses; names the place.
    """
    if not isinstance(value, dict):
        raise PlanError(f"{where} is not an object")
    fields = _field_readers(kind)  # type: ignore[arg-type]
    for key in value:
        if key not in fields and key not in ignore:
            raise PlanError(f"{where} has the unknown key {key[:80]!r}")
    given = {}
    for name, (read, required) in fields.items():
        if name in value:
            given[name] = read(value[name], f"{where}: {name}")
        elif required:
            raise PlanError(f"{where} has no {name}")
    return kind(**given)


def decode_value(kind: Any, value: object, where: str) -> Any:
    """Converts a JSON value to any of the types that a field of `decode` may have.

    Raises:
        PlanError: as `decode`.
    """
    return _reader(kind)(value, where)


@functools.cache
def _field_readers(kind: type) -> dict[str, tuple[Reader, bool]]:
    """For each field of a dataclass how it is read, and whether it is required."""
    hints = typing.get_type_hints(kind)
    missing = dataclasses.MISSING
    return {
        field.name: (_reader(hints[field.name]), field.default is missing and field.default_factory is missing)
        for field in dataclasses.fields(kind)
    }


@functools.cache
def _reader(kind: Any) -> Reader:
    if isinstance(kind, types.UnionType):  # X | None
        read = _reader(kind.__args__[0])
        return lambda value, where: None if value is None else read(value, where)
    origin = typing.get_origin(kind)
    if origin is tuple:
        return _tuple_reader(*typing.get_args(kind))
    if origin is Literal:
        return functools.partial(_one_of, typing.get_args(kind))
    if kind is object:
        return lambda value, _: value
    if origin is Mapping:
        return _mapping_reader(_reader(typing.get_args(kind)[1]))
    if dataclasses.is_dataclass(kind):
        return functools.partial(decode, kind)  # type: ignore[arg-type]
    if issubclass(kind, enum.Enum):
        return functools.partial(_member, kind)
    readers: dict[type, Reader] = {str: _text, bool: _truth, int: _integer, float: _number}
    return readers[kind]


def _tuple_reader(first: Any, *others: Any) -> Reader:
    read, count = _reader(first), None if others == (...,) else 1 + len(others)

    def read_tuple(value: object, where: str) -> tuple[Any, ...]:
        if not isinstance(value, list):
            raise PlanError(f"{where} is not an array")
        if count is not None and len(value) != count:
            raise PlanError(f"{where} is not an array of {count}")
        return tuple(read(entry, f"{where} {index}") for index, entry in enumerate(value))

    return read_tuple


def _mapping_reader(read: Reader) -> Reader:
    def read_mapping(value: object, where: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise PlanError(f"{where} is not an object")
        return {_text(key, where): read(item, f"{where}: {key[:80]}") for key, item in value.items()}

    return read_mapping


def _one_of(known: Sequence[T], value: Any, where: str) -> T:
    if value not in known:
        raise PlanError(f"{where} is {str(value)[:80]!r}, none of {', '.join(map(str, known))}")
    return known[known.index(value)]


def _member(kind: type[enum.Enum], value: object, where: str) -> enum.Enum:
    return kind(_one_of([member.value for member in kind], value, where))


def _truth(value: object, where: str) -> bool:
    if not isinstance(value, bool):
        raise PlanError(f"{where} is neither true nor false")
    return value


def _integer(value: object, where: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise PlanError(f"{where} is not a whole number")
    if abs(value) > MAX_INTEGER:
        raise PlanError(f"{where} is not a number below 2^62")
    return value


def _number(value: object, where: str) -> float:
    if isinstance(value, float):
        return value
    if isinstance(value, bool) or not isinstance(value, int):
        raise PlanError(f"{where} is not a number")
    return float(_integer(value, where))


def _text(value: object, where: str) -> str:
    if not isinstance(value, str) or len(value) > MAX_TEXT:
        raise PlanError(f"{where} is not a text of at most {MAX_TEXT} characters")
    try:
        value.encode()
    except UnicodeEncodeError:
        raise PlanError(f"{where} is not valid Unicode") from None
    return value
