"""Greedy fit, local search and tree search as engines: compiled C++ where possible, otherwise greedy fit alone in Python.

Owns the interface to C: arrays, clock, thread. The loops in C ask the clock themselves, so a deadline holds however busy
the machine is. A call runs in a thread with a stack for deep recursion while the caller waits, so that Ctrl-C takes effect
at once: it sets the clock's flag, and the call returns what it has.
"""

from __future__ import annotations

import ctypes
import dataclasses
import enum
import functools
import itertools
import math
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from memo.mip.address import greedy_fit
from memo.mip.address.instance import Instance
from memo.mip.compile_cpp import load

STACK_NBYTES_PER_BUFFER = 2048
SMALL_PART = 1024
"""Buffers up to which tree.h treats a part as small; measured on instances of 150 to 24,000 buffers."""
LARGEST = 1 << 60
"""Sum of all sizes up to which no sum in the compiled loops overflows."""
NATIVE = Path(__file__).with_name("native")


class SearchAnswer(enum.IntEnum):
    """Outcome of a search; the numbers are those of tree.h."""

    IMPOSSIBLE = 0
    FOUND = 1
    STOPPED = 2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SearchOutcome:
    """Result of a search."""

    answer: SearchAnswer
    offsets: tuple[int, ...]
    """Offset of each buffer by its index; empty unless FOUND."""
    nodes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """What it costs the local search to take a buffer out: its size and width in sections, to these powers."""

    by_size: float
    by_width: float


class SearchEngine(Protocol):
    """Greedy fit, local search and tree search on one instance."""

    def sweep(self) -> tuple[int, ...]:
        """Places the buffers by first fit in the order of time; it has no deadline and needs none."""

    def fit(self, order: Sequence[int], *, best: bool, deadline: float) -> tuple[int, ...] | None:
        """Places the buffers by greedy fit in this order.

        Args:
            order: buffer indices.
            best: take the tightest gap instead of the first.
            deadline: in seconds of `time.monotonic`.

        Returns:
            Offsets by buffer index, or None when the deadline came first.
        """

    def refill(
        self, start: Sequence[int], *, target: int, steps: int, seed: int, weights: Weights, deadline: float
    ) -> tuple[int, ...] | None:
        """Changes a placement until it is no higher than the target.

        Args:
            start: offsets by buffer index; -1 for buffers that are not placed yet.
            target: in units.
            steps: most buffers that are put in by force.
            seed: of the choices among equals.
            weights: of the buffers that have to make way.
            deadline: in seconds of `time.monotonic`.

        Returns:
            Offsets by buffer index, or None when the steps or the time did not suffice.
        """

    def search(
        self, order: Sequence[int], *, capacity: int, node_limit: int, deadline: float, conflicts: array[int]
    ) -> SearchOutcome:
        """Searches for a placement within the capacity.

        Args:
            order: buffer indices, in branching order.
            capacity: in units.
            node_limit: nodes after which the search stops.
            deadline: in seconds of `time.monotonic`.
            conflicts: failures by section; counted up in place.
        """


def make_engine(instance: Instance) -> SearchEngine:
    """Returns the compiled engine, or greedy fits alone where there is no compiler or numbers are too large for it."""
    if sum(instance.sizes) + instance.n * max(instance.alignments, default=0) + instance.lower_bound > LARGEST:
        return Pure(instance)
    library = load(NATIVE / "engine.cpp", includes=tuple(sorted(NATIVE.glob("*.h"))))
    return Pure(instance) if library is None else Compiled(instance, library)


class Pure:
    """Greedy fits in Python, without any search."""

    def __init__(self, instance: Instance) -> None:
        self._instance = instance

    def sweep(self) -> tuple[int, ...]:
        """As `Engine.sweep`."""
        return greedy_fit.sweep(self._instance)

    def fit(self, order: Sequence[int], *, best: bool, deadline: float) -> tuple[int, ...] | None:
        """As `Engine.fit`."""
        return greedy_fit.fit(self._instance, order, best=best, expired=lambda: time.monotonic() > deadline)

    def refill(self, start: Sequence[int], **_: object) -> None:
        """Gives up: see the class."""

    def search(self, order: Sequence[int], **_: object) -> SearchOutcome:
        """Gives up likewise."""
        return SearchOutcome(answer=SearchAnswer.STOPPED, offsets=(), nodes=0)


class Compiled:
    """Engine in C++."""

    def __init__(self, instance: Instance, library: ctypes.CDLL, *, small_part: int = SMALL_PART) -> None:
        self._n, self._small_part, self._library = instance.n, small_part, library
        ranges = array("i", itertools.chain.from_iterable(instance.spans))
        self._arrays = (ranges, array("q", instance.sizes), array("q", instance.alignments))
        self._given = _Given(instance.n, instance.n_sections, *map(_at, self._arrays))

    def sweep(self) -> tuple[int, ...]:
        """As `Engine.sweep`."""
        out = array("q", bytes(8 * self._n))
        self._call("memo_sweep", math.inf, _at(out))
        return tuple(out)

    def fit(self, order: Sequence[int], *, best: bool, deadline: float) -> tuple[int, ...] | None:
        """As `Engine.fit`."""
        ranks, out = array("i", order), array("q", bytes(8 * self._n))
        done = self._call("memo_fit", deadline, _at(ranks), ctypes.c_int32(best), _at(out))
        return tuple(out) if done else None

    def refill(
        self, start: Sequence[int], *, target: int, steps: int, seed: int, weights: Weights, deadline: float
    ) -> tuple[int, ...] | None:
        """As `Engine.refill`."""
        offsets = array("q", start)
        limits = (ctypes.c_int64(target), ctypes.c_int64(steps), ctypes.c_uint64(seed))
        powers = (ctypes.c_double(weights.by_size), ctypes.c_double(weights.by_width))
        done = self._call("memo_refill", deadline, *limits, *powers, _at(offsets))
        return tuple(offsets) if done else None

    def search(
        self, order: Sequence[int], *, capacity: int, node_limit: int, deadline: float, conflicts: array[int]
    ) -> SearchOutcome:
        """As `Engine.search`."""
        ranks, nodes, out = array("i", order), array("q", [0]), array("q", bytes(8 * self._n))
        limits = (ctypes.c_int64(capacity), ctypes.c_int64(node_limit), ctypes.c_int32(self._small_part))
        arrays = (_at(conflicts), _at(nodes), _at(out))
        answer = SearchAnswer(self._call("memo_search", deadline, _at(ranks), *limits, *arrays))
        return SearchOutcome(answer=answer, offsets=tuple(out) if answer is SearchAnswer.FOUND else (), nodes=nodes[0])

    def _call(self, name: str, deadline: float, *arguments: object) -> int:
        stop = array("i", [0])
        clock = _Clock(_at(stop), deadline)
        function = getattr(self._library, name)
        call = functools.partial(function, ctypes.byref(self._given), ctypes.byref(clock), *arguments)
        return _in_thread(call, self._n, lambda: stop.__setitem__(0, 1))


class _Given(ctypes.Structure):
    """As in instance.h; the arrays must outlive it."""

    _fields_ = (
        ("n", ctypes.c_int32),
        ("sections", ctypes.c_int32),
        *((name, ctypes.c_void_p) for name in ("ranges", "sizes", "alignments")),
    )


class _Clock(ctypes.Structure):
    """As in instance.h."""

    _fields_ = (("stop", ctypes.c_void_p), ("deadline", ctypes.c_double))


def _at(numbers: array[int]) -> ctypes.c_void_p:
    return ctypes.c_void_p(numbers.buffer_info()[0])


def _in_thread(call: Callable[[], int], n: int, halt: Callable[[], None]) -> int:
    """Runs the call in a thread with a deep stack, and halts it on Ctrl-C."""
    results: list[int] = []
    errors: list[BaseException] = []

    def body() -> None:
        try:
            results.append(call())
        except BaseException as error:  # handed to the caller's thread below
            errors.append(error)

    # The C library keeps the stack of a thread that has ended, and a limit of the process's data counts it.
    before = threading.stack_size((1 << 20) + (n * STACK_NBYTES_PER_BUFFER >> 12 << 12))
    try:
        thread = threading.Thread(target=body, daemon=True)
        thread.start()
    finally:
        threading.stack_size(before)
    try:
        thread.join()
    finally:
        if thread.is_alive():
            halt()
            thread.join()
    if errors:
        raise errors[0]
    return results[0]
