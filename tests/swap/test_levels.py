"""Settings of recompute as data: mixes of points."""

from __future__ import annotations

import math

import pytest

from memo.errors import UsageError
from memo.swap import Mix, setting_of


def test_mixes_of_equal_fractions_are_equal_and_named_in_their_order() -> None:
    one, other = Mix(points={"all": 0.25, "p2": 0.75}), Mix(points={"p2": 0.75, "all": 0.25})
    assert one == other
    assert hash(one) == hash(other)
    assert str(one) == "0.25 all + 0.75 p2"


@pytest.mark.parametrize("shares", [(), (0.5,), (0.5, 0.6), (-0.5, 1.5), (math.nan, 1.0)])
def test_fractions_that_do_not_sum_to_one_are_refused(shares: tuple[float, ...]) -> None:
    with pytest.raises(UsageError, match="are not fractions that sum to 1"):
        Mix(points={f"p{number}": share for number, share in enumerate(shares, 1)})


@pytest.mark.parametrize("value", [("a", "b", "c"), {0: 1.0}, {"p0": 1.0}, {"matmul": 1.0}, None])
def test_what_is_no_setting_is_refused_by_its_argument(value: object) -> None:
    with pytest.raises(UsageError, match=r"^levels\[3\]: "):
        setting_of(value, argument="levels[3]")
