"""Greedy fit and tree search as engines: compiled C++ where possible, Python otherwise.

Owns the interface to C: arrays, stop flag, thread. A call runs in a thread with a stack for deep recursion while the
caller waits, so that Ctrl-C and the deadline take effect at once: both set the stop flag, and the call returns what it
has.
"""

from __future__ import annotations

import ctypes
import dataclasses
import enum
import sys
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from memo.mip.address import branch_and_bound
from memo.mip.address.instance import Instance
from memo.mip.compile_cpp import load

__all__ = ["Answer", "Compiled", "Engine", "Outcome", "Pure", "make_engine"]

STACK_NBYTES_PER_BUFFER = 2048
SMALL_PART = 1024
"""Buffers up to which search.cpp treats a part as small; measured on instances of 150 to 24,000 buffers."""


class Answer(enum.IntEnum):
    """Outcome of a search; the numbers are those of search.cpp."""

    IMPOSSIBLE = 0
    FOUND = 1
    STOPPED = 2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of a search."""

    answer: Answer
    offsets: tuple[int, ...]
    """By buffer index; empty unless FOUND."""
    nodes: int


class Engine(Protocol):
    """Greedy fit and tree search on one instance."""

    def fit(self, order: Sequence[int], *, best: bool, deadline: float) -> tuple[int, ...] | None:
        """Places the buffers by greedy fit in this order.

        Args:
            order: buffer indices.
            best: take the tightest gap instead of the first.
            deadline: in seconds of `time.monotonic`.

        Returns:
            Offsets by buffer index, or None when the deadline came first.
        """

    def search(
        self, order: Sequence[int], *, capacity: int, node_limit: int, deadline: float, conflicts: array[int]
    ) -> Outcome:
        """Searches for a placement within the capacity.

        Args:
            order: buffer indices, in branching order.
            capacity: in units.
            node_limit: nodes after which the search stops.
            deadline: in seconds of `time.monotonic`.
            conflicts: failures by section; counted up in place.
        """


def make_engine(instance: Instance) -> Engine:
    """Returns the compiled engine, or the one in Python where there is no compiler."""
    library = load(Path(__file__).with_name("search.cpp"))
    return Pure(instance) if library is None else Compiled(instance, library)


class Pure:
    """Engine in Python, two orders of magnitude slower than the compiled one."""

    def __init__(self, instance: Instance) -> None:
        self._instance = instance

    def fit(self, order: Sequence[int], *, best: bool, deadline: float) -> tuple[int, ...] | None:
        """As `Engine.fit`."""
        return branch_and_bound.fit(self._instance, order, best=best, expired=lambda: time.monotonic() > deadline)

    def search(
        self, order: Sequence[int], *, capacity: int, node_limit: int, deadline: float, conflicts: array[int]
    ) -> Outcome:
        """As `Engine.search`."""
        search = branch_and_bound.Tree(
            self._instance,
            order,
            capacity=capacity,
            node_limit=node_limit,
            expired=lambda: time.monotonic() > deadline,
            conflicts=conflicts,
        )
        limit = sys.getrecursionlimit()
        sys.setrecursionlimit(max(limit, 4 * self._instance.n + 1000))
        try:
            found = _in_thread(search.run, self._instance.n * 16, time.monotonic() + 1e9, lambda: search.halt())
        finally:
            sys.setrecursionlimit(limit)
        offsets = tuple(search.offsets) if found == Answer.FOUND else ()
        return Outcome(answer=Answer(found), offsets=offsets, nodes=search.nodes)


class Compiled:
    """Engine in C++."""

    def __init__(self, instance: Instance, library: ctypes.CDLL, *, small_part: int = SMALL_PART) -> None:
        self._instance, self._small_part = instance, small_part
        self._library = library
        library.memo_fit.restype = ctypes.c_int64

    def fit(self, order: Sequence[int], *, best: bool, deadline: float) -> tuple[int, ...] | None:
        """As `Engine.fit`."""
        stop, out = array("i", [0]), array("q", bytes(8 * len(order)))
        problem = _Arrays(self._instance, order)

        def call() -> int:
            return int(self._library.memo_fit(*problem.arguments(), ctypes.c_int32(best), _at(stop), _at(out)))

        if _in_thread(call, len(order), deadline, lambda: stop.__setitem__(0, 1)) < 0:
            return None
        return _by_index(order, out)

    def search(
        self, order: Sequence[int], *, capacity: int, node_limit: int, deadline: float, conflicts: array[int]
    ) -> Outcome:
        """As `Engine.search`."""
        stop, nodes, out = array("i", [0]), array("q", [0]), array("q", bytes(8 * len(order)))
        problem = _Arrays(self._instance, order)

        def call() -> int:
            limits = (ctypes.c_int64(capacity), ctypes.c_int64(node_limit), ctypes.c_int32(self._small_part))
            return int(
                self._library.memo_search(
                    *problem.arguments(), *limits, _at(stop), _at(conflicts), _at(nodes), _at(out)
                )
            )

        answer = Answer(_in_thread(call, len(order), deadline, lambda: stop.__setitem__(0, 1)))
        offsets = _by_index(order, out) if answer is Answer.FOUND else ()
        return Outcome(answer=answer, offsets=offsets, nodes=nodes[0])


class _Arrays:
    """Arrays of an instance in branching order, as C reads them; must outlive the call."""

    def __init__(self, instance: Instance, order: Sequence[int]) -> None:
        rows, ranges = array("i", [0]), array("i")
        for index in order:
            for span in instance.spans[index]:
                ranges.extend(span)
            rows.append(len(ranges) // 2)
        columns = (instance.sizes, instance.alignments, instance.fixed)
        self._counts = (len(order), instance.n_sections)
        self._arrays = (rows, ranges, *(array("q", [column[index] for index in order]) for column in columns))

    def arguments(self) -> list[object]:
        return [*map(ctypes.c_int32, self._counts), *map(_at, self._arrays)]


def _at(numbers: array[int]) -> ctypes.c_void_p:
    return ctypes.c_void_p(numbers.buffer_info()[0])


def _by_index(order: Sequence[int], by_rank: Sequence[int]) -> tuple[int, ...]:
    offsets = [0] * len(order)
    for index, offset in zip(order, by_rank, strict=True):
        offsets[index] = offset
    return tuple(offsets)


def _in_thread(call: Callable[[], int], n: int, deadline: float, halt: Callable[[], None]) -> int:
    """Runs the call in a thread with a deep stack, and halts it at the deadline or on Ctrl-C."""
    results: list[int] = []
    errors: list[BaseException] = []

    def body() -> None:
        try:
            results.append(call())
        except BaseException as error:  # handed to the caller's thread below
            errors.append(error)

    before = threading.stack_size((16 << 20) + (n * STACK_NBYTES_PER_BUFFER >> 12 << 12))
    try:
        thread = threading.Thread(target=body, daemon=True)
        thread.start()
    finally:
        threading.stack_size(before)
    try:
        thread.join(max(0.0, min(deadline - time.monotonic(), threading.TIMEOUT_MAX)))
    finally:
        if thread.is_alive():
            halt()
            thread.join()
    if errors:
        raise errors[0]
    return results[0]
