"""The list of slow tests names tests that there are, and each of them has its turn."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import slow_tests

ROOT = Path(__file__).parent.parent


def test_the_list_names_tests_that_are_there() -> None:
    named = [line.partition("[")[0].split("::") for line in slow_tests.LIST.read_text().splitlines()]
    sources = {path: (ROOT / path).read_text() for path, *_ in named if (ROOT / path).exists()}
    stale = ["::".join(parts) for parts in named if f"def {parts[-1]}(" not in sources.get(parts[0], "")]
    assert stale == [], "take these from tests/slow.txt, or write it anew: CONTRIBUTING.md"


def test_long_ones_are_slow_but_the_quickest_of_a_function_and_tests_of_the_tree() -> None:
    seconds = {
        "tests/a/test_a.py::test_quick": 0.1,
        "tests/a/test_a.py::test_long[1]": 1.5,
        "tests/a/test_a.py::test_long[2]": 1.4,
        "tests/a/test_a.py::test_longer[1]": 7.0,
        "tests/test_tree.py::test_tree": 7.0,
    }
    assert slow_tests.slow_tests(seconds) == ["tests/a/test_a.py::test_long[1]", "tests/a/test_a.py::test_longer[1]"]


def test_in_as_many_turns_as_there_are_each_slow_test_runs_once_and_a_promise_each_time() -> None:
    names = [*slow_tests.LIST.read_text().splitlines()[:40], "tests/a/test_a.py::test_promise"]

    class Item:
        def __init__(self, nodeid: str) -> None:
            self.nodeid, self.marks = nodeid, {"slow", *(["promise"] if "promise" in nodeid else [])}

        def add_marker(self, mark: Any) -> None:
            self.marks.add(mark.name)

        def get_closest_marker(self, name: str) -> str | None:
            return name if name in self.marks else None

    ran: list[str] = []
    for turn in range(4):
        config: Any = SimpleNamespace(
            getoption=lambda name, turn=turn: f"{turn + 4}/4",
            hook=SimpleNamespace(pytest_deselected=lambda items: None),
        )
        items: list[Any] = [Item(name) for name in names]
        slow_tests.pytest_collection_modifyitems(config, items)
        ran += [item.nodeid for item in items]
    assert sorted(ran) == sorted([*names, *[names[-1]] * 3])


def test_of_a_product_a_few_rows_have_each_value_and_each_pair() -> None:
    rows = [{"a": a, "b": b, "c": c} for a in range(4) for b in range(3) for c in "xy"]
    for together, most in ((1, 4), (2, 12)):
        kept = slow_tests.covering(rows, together)
        assert len(kept) == most
        for names in itertools.combinations("abc", together):
            assert {tuple(rows[i][name] for name in names) for i in kept} == {
                tuple(row[name] for name in names) for row in rows
            }
    ones = Counter(rows[i]["b"] for i in slow_tests.covering(rows, 1))
    assert max(ones.values()) - min(ones.values()) <= 1


def test_tests_whose_values_others_have_are_slow() -> None:
    class Item:
        def __init__(self, a: int, b: int) -> None:
            self.nodeid, self.callspec = f"t.py::test_a[{a}-{b}]", SimpleNamespace(params={"a": a, "b": b})
            self.marks = {"covering": pytest.mark.covering(1).mark}

        def iter_markers(self, name: str) -> list[Any]:
            return [SimpleNamespace(args=("a", [])), SimpleNamespace(args=(("b",), []))]

        def add_marker(self, mark: Any) -> None:
            self.marks[mark.name] = mark

        def get_closest_marker(self, name: str) -> Any:
            return self.marks.get(name)

    items: list[Any] = [Item(a, b) for a in range(3) for b in range(3)]
    slow_tests._leave_out_what_others_cover(items)
    assert sum("slow" in item.marks for item in items) == 6


def test_the_first_of_some_values_are_kept() -> None:
    one, *others = slow_tests.first(range(3), 1)
    assert one == 0
    assert [(each.values, each.marks[0].name) for each in others] == [((1,), "slow"), ((2,), "slow")]


def test_what_each_test_took_is_written(tmp_path: Path) -> None:
    seconds = slow_tests._Seconds(tmp_path / "seconds")
    for took in (0.5, 1.25):
        seconds.pytest_runtest_logreport(SimpleNamespace(nodeid="test_a.py::test_a[x y]", duration=took))  # type: ignore[arg-type]
    seconds.pytest_sessionfinish()
    assert (tmp_path / "seconds").read_text() == "1.750\ttest_a.py::test_a[x y]\n"
