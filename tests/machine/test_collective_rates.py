"""The line through times of collectives, and the times themselves among ranks of this machine."""

from __future__ import annotations

import json
import random
import statistics
from pathlib import Path
from typing import Any

import pytest
from ready_ranks import run_ranks

from memo.machine.collective_rates import MOST_BYTES_PER_S, fit_line

SIZES = [4.0**power for power in range(5, 15)]


def measured(ranks: int, *sizes: int, seconds: float = 0.0, per_node: int) -> dict[str, Any]:
    done = run_ranks(ranks, Path(__file__).parent / "rates_worker.py", seconds, per_node, *sizes, timeout=120)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


# The line


def test_times_of_a_line_are_fitted_by_it() -> None:
    latency, rate = fit_line([(n, 20e-6 + n / 30e9) for n in SIZES])
    assert latency == pytest.approx(20e-6)
    assert rate == pytest.approx(30e9)


def test_small_and_large_sizes_count_alike() -> None:
    # A tenth more or less at any size moves neither by much, though the largest take ten thousand times as long.
    dice = random.Random(3)
    for _ in range(100):
        latency, rate = fit_line([(n, (20e-6 + n / 30e9) * dice.uniform(0.9, 1.1)) for n in SIZES])
        assert latency == pytest.approx(20e-6, rel=0.12)
        assert rate == pytest.approx(30e9, rel=0.25)


@pytest.mark.parametrize("index", range(len(SIZES)))
def test_one_outlier_moves_the_line_little(index: int) -> None:
    times = [20e-6 + n / 3e9 for n in SIZES]
    times[index] *= 8
    latency, rate = fit_line(list(zip(SIZES, times, strict=True)))
    assert latency == pytest.approx(20e-6, rel=0.2)
    assert rate == pytest.approx(3e9, rel=0.3)


def test_neither_is_negative() -> None:
    # Faster than in proportion, so that a line through them would begin below 0: it begins at 0.
    latency, rate = fit_line([(n, 1e-9 * n**1.2) for n in SIZES])
    assert latency == 0.0
    assert 0 < rate < MOST_BYTES_PER_S
    # Times that fall with the size: their level alone.
    latency, rate = fit_line([(n, 1e-3 / (1 + n * 1e-9)) for n in SIZES])
    assert latency == pytest.approx(1e-3, rel=0.3)
    assert rate == MOST_BYTES_PER_S
    assert fit_line([(1024.0, 1e-3)]) == (0.0, pytest.approx(1.024e6))


def test_longer_and_shorter_by_one_factor_count_alike() -> None:
    # The geometric mean of 1.00 and 1.21 ms.
    assert fit_line([(1.0, 1e-3), (1.0, 1.21e-3)])[1] == pytest.approx(1 / 1.1e-3, rel=1e-3)


# The times


def test_the_line_of_four_ranks_gives_the_medians_that_it_was_fitted_to() -> None:
    found = measured(4, seconds=0.5, per_node=4)
    assert (found["world_size"], found["backend"], found["problems"]) == (4, "gloo", [])
    assert [fit["collective"] for fit in found["fits"]] == ["all_gather", "reduce_scatter", "all_to_all", "send"]
    for fit in found["fits"]:
        assert fit["within_node"]
        assert (fit["ranks"], fit["nodes"], fit["ranks_per_node"], fit["fewest_ranks_per_node"]) == (4, 1, 4, 4)
        assert fit["times"][0]["message_bytes"] == 1024
        ratios = [
            (fit["latency_s"] + each["message_bytes"] / fit["bytes_per_s"]) / each["median_s"] for each in fit["times"]
        ]
        # Half of the sizes within a factor of 3: four ranks share the processors of a machine that does other work, too.
        assert statistics.median(max(ratio, 1 / ratio) for ratio in ratios) < 3
        assert fit["typical_error"] == pytest.approx(statistics.median(abs(ratio - 1) for ratio in ratios))
        assert fit["largest_error"] == pytest.approx(max(abs(ratio - 1) for ratio in ratios))


def test_given_sizes_are_measured_alone() -> None:
    found = measured(4, 4096, 1 << 20, per_node=2)
    assert len(found["fits"]) == 8
    assert {tuple(each["message_bytes"] for each in fit["times"]) for fit in found["fits"]} == {(4096, 1 << 20)}


def test_ranks_of_several_nodes_are_measured_within_a_node_and_all_together() -> None:
    found = measured(3, seconds=0.1, per_node=2)
    # One node has a single rank, so there is nothing to measure within nodes.
    assert [(fit["within_node"], fit["ranks"], fit["nodes"]) for fit in found["fits"]] == [(False, 3, 2)] * 4
    assert {(fit["ranks_per_node"], fit["fewest_ranks_per_node"]) for fit in found["fits"]} == {(2, 1)}
    found = measured(4, seconds=0.1, per_node=2)
    places = [(fit["within_node"], fit["ranks"], fit["nodes"]) for fit in found["fits"]]
    assert places == [(True, 2, 1)] * 4 + [(False, 4, 2)] * 4
