"""Log of one layer call: its words, the values and storages that they number, and the key that these make.

The log is flat, and it is the key of the call's plan: two calls with equal logs read and write the same storages with the
same operators, so that what was decided for one holds for the other. Storages and values are numbered as they appear:

    storage   one piece of memory
    value     a tensor: offset, sizes, strides and type over a storage

Numbers with a fraction and objects (generators, process groups) are carried beside the log, as they may differ from call
to call. A log holds no tensor.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

Holds = Mapping[int, tuple[Any, tuple[int, ...], bool]]
"""Operator number -> (operator, positions of its results whose storages are held, True to hold zeros and ones as bits)."""

Geometry = tuple[int, int | torch.SymInt, torch.Size, tuple[int, ...], torch.dtype]
"""Number of the storage; offset, sizes and strides in elements; type."""


class Marker(enum.Enum):
    """Words of the log that stand for themselves."""

    __hash__ = object.__hash__

    OUTPUTS = "arguments end, results follow"
    SAVED = "autograd saves the value that follows"
    TRUE = "True"
    FALSE = "False"
    CARRIED = "an argument that is carried beside the log"
    LIST = "a list begins; its length follows"
    NAMED = "the name of the next argument follows"
    HIDDEN = "a tensor without a storage of its own, or whose bytes do not describe it"
    OTHER = "a result that is no tensor"


OUTPUTS, SAVED, TRUE, FALSE, CARRIED = Marker.OUTPUTS, Marker.SAVED, Marker.TRUE, Marker.FALSE, Marker.CARRIED
LIST, NAMED, HIDDEN, OTHER = Marker.LIST, Marker.NAMED, Marker.HIDDEN, Marker.OTHER


class Origin(enum.Enum):
    """Where a storage comes from."""

    __hash__ = object.__hash__

    INPUT = "the layer's hidden states"
    GIVEN = "another argument of the layer"
    PARAMETER = "a parameter"
    FOUND = "it was there, or something made it that the dispatcher does not see"
    MADE = "an operator of the layer made it"


class Ref:
    """Word of the log: a value, by its number."""

    __slots__ = ("value",)

    def __init__(self, value: int) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"v{self.value}"


_REFS: dict[int, Ref] = {}


def word_of(value: int) -> Ref:
    """The word of a value: one object for each number, so that words are compared by identity."""
    known = _REFS.get(value)
    return _REFS.setdefault(value, Ref(value)) if known is None else known  # at once, whichever threads ask


Storage = tuple[Origin, int, int, str]
"""Origin, bytes, the number of the operator that made it (-1 for others), and the type of its device."""


class Key:
    """Log, values and storages of one call; hashed once."""

    __slots__ = ("_hash", "log", "storages", "values")

    def __init__(self, log: Sequence[Any], values: Sequence[Geometry], storages: Sequence[Storage]) -> None:
        self.log = tuple(log)
        self.values = tuple(values)
        self.storages = tuple(storages)
        self._hash = hash((self.log, self.values, self.storages))

    def is_of(self, log: Sequence[Any], values: Sequence[Geometry], storages: Sequence[Storage]) -> bool:
        """True if it is the key of that call."""
        return self.log == tuple(log) and self.values == tuple(values) and self.storages == tuple(storages)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Key)
            and self._hash == other._hash
            and self.log == other.log
            and self.values == other.values
            and self.storages == other.storages
        )


class Function:
    """A function of the program that the log has as one operator.

    Args:
        function: takes and returns tensors.
        repeats: it may be called again, as `recomputable` declares; results of a memoized function are kept.
        talks: it ran collectives.
    """

    __slots__ = ("function", "repeats", "talks")
    is_random = False
    non_blocking_at = None
    func = None

    def __init__(self, function: Callable[..., Any], *, repeats: bool, talks: bool = False) -> None:
        self.function = function
        self.repeats = repeats
        self.talks = talks

    @property
    def _key(self) -> tuple[Any, ...]:
        return self.function, self.repeats, self.talks

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Function) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __repr__(self) -> str:
        return getattr(self.function, "__name__", "a function")


class LoggedCollective(NamedTuple):
    """A collective of the call, or a function of the program that ran some."""

    number: int
    """Number of the operator."""
    name: str
    groups: tuple[str, ...]
    """Names of the process groups of several ranks that it was given."""
