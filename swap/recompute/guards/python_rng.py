"""Detects draws from Python's and NumPy's random generators, which torch's RNG state does not cover.

Reading a whole state (624 words, one object each) takes 50 and 110 us, twice in each layer's forward. So the two words
that change with a draw are read from the generator's memory, at an address that is verified first; where that fails
the whole state is read.
"""

from __future__ import annotations

import _random
import ctypes
import functools
import random
import sys
from typing import Any

__all__ = ["drawn_by_python"]

_WORDS = 624  # of the Mersenne twister, which both are
_TELLING = 1  # each word changes when all have been used; seeding leaves the first as it is


class _PythonState(ctypes.Structure):
    _fields_ = (("position", ctypes.c_int), ("words", ctypes.c_uint32 * _WORDS))


class _NumPyState(ctypes.Structure):
    _fields_ = (("words", ctypes.c_uint32 * _WORDS), ("position", ctypes.c_int))


def drawn_by_python() -> tuple[object, ...]:
    """Positions of the generators; equal for two calls if nothing was drawn between them."""
    return (*_python(), *(_numpy() if "numpy" in sys.modules else ()))


# The one behind the functions of `random`.
_GENERATOR: random.Random = random.getstate.__self__  # type: ignore[attr-defined]


def _python() -> tuple[object, ...]:
    state = _state_of(_GENERATOR)
    if state is None:
        _, words, gauss = _GENERATOR.getstate()
        return words[-1], words[_TELLING], gauss
    return state.position, state.words[_TELLING], _GENERATOR.gauss_next  # type: ignore[attr-defined]


@functools.cache
def _state_of(generator: random.Random) -> _PythonState | None:
    """Right behind the object's header, as CPython has it; None where it is not."""
    if not _lies_behind_header():
        return None
    return _PythonState.from_address(id(generator) + object.__basicsize__)


@functools.cache
def _lies_behind_header() -> bool:
    if _random.Random.__basicsize__ < object.__basicsize__ + ctypes.sizeof(_PythonState):
        return False
    probe = random.Random(7)
    state = _PythonState.from_address(id(probe) + object.__basicsize__)
    for draws in (0, 1, _WORDS, 1):
        for _ in range(draws):
            probe.getrandbits(32)
        words = probe.getstate()[1]
        if (state.position, *state.words) != (words[-1], *words[:-1]):
            return False
    return True


class _NumPy:
    """NumPy's generator, and what it said of itself when it was last asked."""

    def __init__(self, generator: Any) -> None:
        self._generator = generator
        self._source: Any = None
        self._state: _NumPyState | None = None
        self._stood: tuple[object, ...] | None = None

    def stands(self) -> tuple[object, ...]:
        # It may be given another source of bits, and other words.
        source = self._generator._bit_generator
        if source is not self._source:
            self._source, self._state = source, _state_of_source(source)
            self._stood = None
        if self._state is None:
            return (repr(self._generator.get_state(legacy=False)),)
        stands = self._state.position, self._state.words[_TELLING]
        if stands != self._stood:
            # Every second normal number is the spare one of a pair, and moves nothing. With none to spare, the next moves.
            spare = self._generator.get_state(legacy=False)["has_gauss"]
            self._stood = None if spare else stands
            return *stands, spare
        return *stands, 0


_NUMPY: dict[int, _NumPy] = {}


def _numpy() -> tuple[object, ...]:
    generator = sys.modules["numpy"].random.get_state.__self__
    known = _NUMPY.get(id(generator))
    if known is None:
        known = _NUMPY[id(generator)] = _NumPy(generator)
    return known.stands()


def _state_of_source(source: Any) -> _NumPyState | None:
    """None for anything but a Mersenne twister that keeps its state as numpy does."""
    if type(source).__name__ != "MT19937":
        return None
    state = _NumPyState.from_address(source.ctypes.state_address)
    told = source.state["state"]
    return state if (*state.words, state.position) == (*map(int, told["key"]), told["pos"]) else None
