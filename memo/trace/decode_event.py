"""Strict decoding of one trace line to one event.

The accepted fields and types are those of the dataclasses in `memo.events`, read once at import, so that the format has
one definition. Refused with a TraceError: an unknown kind or field, a duplicate key, NaN or Infinity, a float in place
of an integer, an integer outside [0, 2**63).
"""

from __future__ import annotations

import dataclasses
import enum
import types
import typing
from collections.abc import Callable
from typing import Any

from memo.bounded_files import MAX_INTEGER, Refused, parse_object
from memo.errors import TraceError
from memo.events import CounterEvent, Event, Note, Owned, Span, Stall, StateChange, StepMark, StorageUse

_EVENT_TYPES = (StateChange, Span, Stall, StorageUse, CounterEvent, Owned, StepMark, Note)
_Check = Callable[[object], Any]


def decode_object(text: str) -> dict[str, Any]:
    """Parses one JSON object.

    Raises:
        TraceError: not JSON, not an object, a duplicate key, or a number that is not finite.
    """
    try:
        return parse_object(text)
    except Refused as error:
        raise TraceError(str(error)) from None


def natural(value: object) -> int:
    """Checks an integer in [0, 2**63).

    Raises:
        TraceError: it is something else.
    """
    if type(value) is not int:
        raise TraceError(f"{_shown(value)} is not an integer")
    if not 0 <= value <= MAX_INTEGER:
        raise TraceError(f"{_shown(value)} is outside 0 .. 2^63-1")
    return value


def text(value: object) -> str:
    """Checks a string.

    Raises:
        TraceError: it is something else.
    """
    if type(value) is not str:
        raise TraceError(f"{_shown(value)} is not a text")
    return value


def _naturals(value: object) -> tuple[int, ...]:
    if type(value) is not list:
        raise TraceError(f"{_shown(value)} is not a list")
    return tuple(natural(item) for item in value)


def _member(members: type[enum.StrEnum]) -> _Check:
    known = {str(member.value): member for member in members}

    def check(value: object) -> enum.StrEnum:
        found = known.get(value) if type(value) is str else None
        if found is None:
            raise TraceError(f"{_shown(value)} is none of {', '.join(known)}")
        return found

    return check


def _shown(value: object) -> str:
    return ascii(value)[:40]


def _check_for(annotation: Any) -> _Check:
    if isinstance(annotation, types.UnionType):
        annotation = next(arm for arm in typing.get_args(annotation) if arm is not types.NoneType)
    if annotation is int:
        return natural
    if annotation is str:
        return text
    if typing.get_origin(annotation) is tuple:
        return _naturals
    return _member(annotation)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Shape:
    """Fields of one event type, with the check of each."""

    make: Callable[..., Event]
    checks: dict[str, _Check]
    required: frozenset[str]


class _Mark(enum.StrEnum):
    """Values of a StepMark's phase."""

    BEGIN = "begin"
    END = "end"


def _shape_of(event_type: type[Any]) -> _Shape:
    hints = typing.get_type_hints(event_type) | ({"phase": _Mark} if event_type is StepMark else {})
    fields = dataclasses.fields(event_type)
    return _Shape(
        make=event_type,
        checks={field.name: _check_for(hints[field.name]) for field in fields},
        required=frozenset(field.name for field in fields if field.default is dataclasses.MISSING),
    )


_SHAPES = {event_type.kind: _shape_of(event_type) for event_type in _EVENT_TYPES}


def decode_event(line: dict[str, Any]) -> Event:
    """Converts a line's object to its event.

    Raises:
        TraceError: unknown kind or field, missing field, wrong type, or a time that ends beyond 2**63.
    """
    kind = line.pop("k", None)
    shape = _SHAPES.get(kind) if isinstance(kind, str) else None
    if shape is None:
        raise TraceError(f"unknown kind {_shown(kind)}")
    checks = shape.checks
    try:
        values = {name: checks[name](value) for name, value in line.items()}
    except KeyError as unknown:
        raise TraceError(f"a {kind} has no field {_shown(unknown.args[0])}") from None
    if not shape.required <= values.keys():
        raise TraceError(f"a {kind} needs {', '.join(sorted(shape.required - values.keys()))}")
    if values["t"] + values.get("d", 0) > MAX_INTEGER:
        raise TraceError("a span ends beyond 2^63 ns")
    return shape.make(**values)
