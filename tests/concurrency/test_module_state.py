"""State that all managers of a process share, used by several threads at once."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from memo.lru import LRU
from memo.manager import memory_errors
from memo.swap import touched_slab_bytes
from memo.swap.memory import pinned
from memo.swap.memory.slab import PageableSlab
from memo.swap.recompute.tape import log, operators

pytestmark = pytest.mark.usefixtures("switching")


def at_once(*works: Callable[[], None], seconds: float = 0.0) -> None:
    """Runs each in a thread, over and over for some seconds; what one raises is raised here."""
    errors: list[BaseException] = []
    begin = threading.Barrier(len(works))

    def repeat(work: Callable[[], None]) -> None:
        try:
            begin.wait(30)
            end = time.monotonic() + seconds
            work()
            while time.monotonic() < end and not errors:
                work()
        except BaseException as error:  # of the thread, to be raised in the test's
            errors.append(error)

    threads = [threading.Thread(target=repeat, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]


def test_a_number_has_one_word_whoever_asks_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """A word of another number would be another value of the tape: a wrong gradient that nothing tells."""
    for _ in range(20):
        monkeypatch.setattr(log, "_REFS", type(log._REFS)())
        words: list[list[log.Ref]] = [[], [], [], []]
        at_once(*(lambda mine=mine: mine.extend(map(log.word_of, range(5000))) for mine in words))  # type: ignore[misc]
        for number, one in enumerate(zip(*words, strict=True)):
            assert {word.value for word in one} == {number}
            assert len(set(map(id, one))) == 1


def test_an_operator_is_described_once_whoever_asks_first(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("relu", "sin", "cos", "exp", "mm", "neg", "tanh", "bmm")
    functions = [getattr(torch.ops.aten, name).default for name in names]
    for _ in range(20):
        monkeypatch.setattr(operators, "_OPERATORS", {})
        found: list[list[operators.Operator]] = [[], []]
        at_once(*(lambda mine=mine: mine.extend(map(operators.operator_of, functions)) for mine in found))  # type: ignore[misc]
        assert all(one is other for one, other in zip(*found, strict=True))


def test_slabs_are_counted_while_others_come_and_go() -> None:
    kept = [PageableSlab(4096) for _ in range(50)]
    for slab in kept:
        slab.grow(4096)
        slab.wait(4096)
    before = touched_slab_bytes()

    def come_and_go() -> None:
        slabs = [PageableSlab(4096) for _ in range(10)]
        slabs[0].close()

    def count() -> None:
        assert touched_slab_bytes() == before

    at_once(come_and_go, count, seconds=1.0)
    for slab in kept:
        slab.close()


def test_copies_are_divided_at_their_own_borders_while_others_lock_and_unlock(monkeypatch: pytest.MonkeyPatch) -> None:
    block = torch.empty(1 << 20, dtype=torch.uint8)
    address = block.data_ptr()
    own = [address, address + (1 << 18), address + (1 << 19)]
    monkeypatch.setattr(pinned, "_starts", sorted(own))

    def lock_and_unlock() -> None:
        for below in range(1, 20):
            pinned._starts.insert(0, address - (below << 20))
        del pinned._starts[:19]

    def divide() -> None:
        assert pinned._borders(block) == [1 << 18, 1 << 19]

    at_once(lock_and_unlock, divide, seconds=1.0)


@dataclasses.dataclass(frozen=True)
class _Key:
    """Hashed and compared in Python, as the rates of a device are."""

    number: int


def test_a_cache_of_all_managers_evicts_what_nobody_else_is_looking_up() -> None:
    cache: LRU[_Key, int] = LRU(1)

    def look_up(key: _Key = _Key(0)) -> None:
        for _ in range(100):
            if cache.get(key) is None:
                cache[key] = 1

    def evict(key: _Key = _Key(1)) -> None:
        cache[key] = 1

    at_once(look_up, evict, seconds=1.0)
    assert len(cache) == 1


class _Engine:
    stats = SimpleNamespace(live_entries=0)


def test_an_error_of_backward_is_told_while_managers_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Any = _Engine()
    kept = [memory_errors.MemoryWatch(engine, None, None, None) for _ in range(50)]

    def fail() -> None:
        raise ValueError("of the program")

    monkeypatch.setattr(memory_errors, "_original", fail)

    def come_and_go() -> None:
        for watch in [memory_errors.MemoryWatch(engine, None, None, None) for _ in range(10)]:
            watch.close()

    def run() -> None:
        with pytest.raises(ValueError, match="of the program"):
            memory_errors._run_backward()

    at_once(come_and_go, run, seconds=1.0)
    monkeypatch.undo()
    for watch in kept:
        watch.close()
