"""The learning rate is a pure function of the step."""

from __future__ import annotations

import pytest

from memo.errors import UsageError
from memo.gpt.optim import LrSchedule


def test_rises_linearly_then_falls_to_the_floor() -> None:
    schedule = LrSchedule(peak=1.0, floor=0.1, warmup=4, steps=12)
    assert [schedule.at(step) for step in (1, 2, 3, 4)] == [0.25, 0.5, 0.75, 1.0]
    assert schedule.at(8) == pytest.approx(0.55, abs=1e-15)  # half of the cosine
    assert schedule.at(12) == pytest.approx(0.1, abs=1e-15)
    rates = [schedule.at(step) for step in range(4, 13)]
    assert rates == sorted(rates, reverse=True)


def test_stays_at_the_floor_beyond_the_last_step() -> None:
    assert LrSchedule(peak=1.0, floor=0.1, warmup=0, steps=5).at(9) == pytest.approx(0.1, abs=1e-15)


def test_a_warmup_as_long_as_the_run_divides_by_nothing() -> None:
    assert LrSchedule(peak=2.0, floor=0.0, warmup=5, steps=5).at(5) == 2.0


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"peak": 0.0}, "lr"),
        ({"peak": float("nan")}, "lr"),
        ({"floor": 2.0}, "min-lr"),
        ({"floor": float("nan")}, "min-lr"),
        ({"warmup": -1}, "warmup"),
        ({"steps": 0}, "steps"),
    ],
)
def test_a_rate_that_means_nothing_is_refused_by_name(changes: dict[str, float], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        LrSchedule(**({"peak": 1.0, "floor": 0.1, "warmup": 1, "steps": 5} | changes))  # type: ignore[arg-type]
