"""A lasting change of the pace of steps is noticed, and noise is not."""

from __future__ import annotations

import random

import pytest

from memo.autoplan.pace import CHANGE, WINDOW, Pace


@pytest.mark.parametrize("ratio", [1.2, 3.0, 1 / 1.2, 0.3])
def test_a_change_that_lasts_is_noticed_soon(ratio: float) -> None:
    pace = Pace()
    assert not any(pace.add(1.0) for _ in range(20))
    found = [pace.add(ratio) for _ in range(WINDOW + pace.patience)]
    assert any(found)
    assert not any(found[: WINDOW // 2 + 1]), "a minority of odd steps moves no median"


def test_noise_is_not_noticed() -> None:
    draw = random.Random(0)
    pace = Pace()
    for _ in range(2000):
        seconds = draw.uniform(1 - CHANGE / 2, 1 + CHANGE / 2)
        if draw.random() < 0.1:
            seconds *= 5
        assert not pace.add(seconds)


def test_each_look_makes_the_next_one_rarer() -> None:
    """A machine that is fast for as long as it is slow: looks come at growing distances, and in the end none."""
    pace, looks = Pace(), []
    for number in range(4000):
        if pace.add(1.0 if number // 40 % 2 else 2.0):
            looks.append(number)
            pace.restart()
    assert 1 <= len(looks) <= 4


def test_after_a_look_the_steps_that_follow_are_the_reference() -> None:
    pace = Pace()
    for _ in range(WINDOW):
        pace.add(1.0)
    pace.restart()
    assert not any(pace.add(2.0) for _ in range(50))
