"""Tests that `make test` leaves out for their length: those marked `slow`, those that tests/slow.txt names, and
of a function marked `covering` those whose values others of its have, too.

    @pytest.mark.covering(2)                one test of `make test` has each two values of its parametrized arguments
    @pytest.mark.covering(1, apart=True)    each value, also of arguments that one `parametrize` gives together
    first(values, 8)                        the first as they are, the rest slow: seeds, and what else has no two arguments

    pytest --turn 6/4         of these only one in four, by their names' checksums, and those that hold a promise
    pytest --seconds FILE     writes what each test took; `python tests/support/slow_tests.py FILE` makes the list from it

`.ci/run` takes the turn from the commit, so that each of them runs with one change in four; `make test-all` runs them all.
"""

from __future__ import annotations

import sys
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

LIST = Path(__file__).parents[1] / "slow.txt"
MOST_SECONDS = 1.0
"""A test that takes longer on a quiet core is slow, except tests of the tree itself, which lie beside their folders, and the
quickest of a function's that takes KEPT_SECONDS at most."""
KEPT_SECONDS = 2.0


def first(values: Iterable[Any], kept: int) -> list[Any]:
    """For `parametrize`: so many values, and the rest as slow ones."""
    return [each if place < kept else pytest.param(each, marks=pytest.mark.slow) for place, each in enumerate(values)]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--turn", metavar="N/M", help="of slow tests those whose turn is N modulo M, and all with a promise"
    )
    parser.addoption("--seconds", metavar="FILE", type=Path, help="writes each test's seconds and id")


def pytest_configure(config: pytest.Config) -> None:
    file = config.getoption("--seconds")
    if file is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Seconds(file))


class _Seconds:
    """Seconds of each test, its fixtures included, written when all have run."""

    def __init__(self, file: Path) -> None:
        self._file, self._taken = file, Counter[str]()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._taken[report.nodeid] += report.duration  # type: ignore[assignment]

    def pytest_sessionfinish(self) -> None:
        self._file.write_text("".join(f"{taken:.3f}\t{test}\n" for test, taken in self._taken.items()))


@pytest.hookimpl(tryfirst=True)  # before -m selects
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    named = set(LIST.read_text().splitlines())
    for item in items:
        if item.nodeid in named:
            item.add_marker(pytest.mark.slow)
    _leave_out_what_others_cover(items)
    if (turn := config.getoption("--turn")) is None:
        return
    number, of = map(int, turn.split("/"))
    left = {item for item in items if item.get_closest_marker("slow") and not _has_turn(item, number, of)}
    config.hook.pytest_deselected(items=list(left))
    items[:] = [item for item in items if item not in left]


def _has_turn(item: pytest.Item, number: int, of: int) -> bool:
    alone = item.get_closest_marker("promise") is not None and item.get_closest_marker("covering") is None
    return alone or zlib.crc32(item.nodeid.encode()) % of == number % of


def _leave_out_what_others_cover(items: list[pytest.Item]) -> None:
    functions = defaultdict[str, list[pytest.Item]](list)
    for item in items:
        if item.get_closest_marker("covering") is not None and item.get_closest_marker("slow") is None:
            functions[item.nodeid.partition("[")[0]].append(item)
    for tests in functions.values():
        mark: Any = tests[0].get_closest_marker("covering")
        kept = covering([_values(test, **mark.kwargs) for test in tests], *mark.args)
        for test in [test for place, test in enumerate(tests) if place not in kept]:
            test.add_marker(pytest.mark.slow)


def _values(item: pytest.Item, apart: bool = False) -> dict[str, str]:
    params = item.callspec.params  # type: ignore[attr-defined]
    if apart:
        return {name: repr(value) for name, value in params.items()}
    found = {}
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0].replace(",", " ").split() if isinstance(mark.args[0], str) else mark.args[0]
        found[" ".join(names)] = repr([params[name] for name in names])
    return found


def covering(rows: Sequence[Mapping[str, Any]], together: int) -> set[int]:
    """Places of rows, few, that have all the values that occur, `together` at a time, each about as often as another."""
    tuples = [set(combinations(sorted(row.items(), key=lambda item: item[0]), together)) for row in rows]
    missing, kept, uses = set[object]().union(*tuples), set[int](), Counter[tuple[str, Any]]()
    while missing:
        best = max(
            (place for place in range(len(rows)) if place not in kept),
            key=lambda place: (
                len(tuples[place] & missing),
                -sum(uses[value] for value in rows[place].items()),
                -place,
            ),
        )
        kept.add(best)
        missing -= tuples[best]
        uses.update(rows[best].items())
    return kept


def slow_tests(seconds: dict[str, float]) -> list[str]:
    """Ids of the slow ones, in order."""
    by_function = defaultdict[str, list[str]](list)
    for test in seconds:
        by_function[test.partition("[")[0]].append(test)
    slow = {test for test in seconds if seconds[test] > MOST_SECONDS and test.count("/") > 1}
    for tests in by_function.values():
        quickest = min(tests, key=seconds.__getitem__)
        if seconds[quickest] <= KEPT_SECONDS:
            slow.discard(quickest)
    return sorted(slow)


if __name__ == "__main__":
    lines = [line.split("\t") for line in Path(sys.argv[1]).read_text().splitlines()]
    LIST.write_text("".join(f"{test}\n" for test in slow_tests({test: float(taken) for taken, test in lines})))
