"""Division of layers over stages, against every division there is."""

from __future__ import annotations

import itertools
import random

from memo.mip.cluster import StageCosts, divide_equal_layers, divide_layers


def slowest(costs: list[StageCosts], sizes: tuple[int, ...]) -> tuple[float, float]:
    """Seconds of the slowest run, and the sum; infinite where a device has no room."""
    first, times = 0, []
    for run, size in enumerate(sizes):
        own = costs[run]
        seconds = sum(own.seconds[first : first + size])
        seconds += own.before_s * (run == 0) + own.after_s * (run == len(sizes) - 1)
        if sum(own.nbytes[first : first + size]) > own.room_bytes:
            seconds = float("inf")
        times.append(seconds)
        first += size
    return max(times), sum(times)


def every(layers: int, runs: int) -> list[tuple[int, ...]]:
    ends = itertools.combinations(range(1, layers), runs - 1)
    return [tuple(b - a for a, b in itertools.pairwise((0, *cut, layers))) for cut in ends]


def alike(seconds: float, layers: int, **rest: float) -> StageCosts:
    return StageCosts(seconds=[seconds] * layers, nbytes=[1] * layers, room_bytes=1 << 40, **rest)


def test_layers_are_in_proportion_to_speed() -> None:
    assert divide_layers([alike(1.0, 12), alike(3.0, 12)]) == (9, 3)
    assert divide_layers([alike(2.0, 10), alike(1.0, 10), alike(1.0, 10)]) == (2, 4, 4)


def test_equal_stages_are_equal() -> None:
    assert divide_layers([alike(1.0, 32)] * 4) == (8, 8, 8, 8)
    assert divide_layers([alike(0.1, 12)] * 4) == (3, 3, 3, 3)


def test_the_head_is_made_up_for_with_layers() -> None:
    assert divide_layers([alike(1.0, 10, after_s=2.0)] * 2) == (6, 4)
    assert divide_layers([alike(1.0, 10, before_s=4.0)] * 2) == (3, 7)


def test_a_small_device_has_fewer_layers() -> None:
    small = StageCosts(seconds=[1.0] * 10, nbytes=[10] * 10, room_bytes=29)
    assert divide_layers([small, alike(1.0, 10)]) == (2, 8)
    assert divide_layers([small, small]) == (5, 5), "nothing fits, so memory is not looked at"


def test_the_slowest_run_is_as_short_as_that_of_any_division_and_then_the_sum() -> None:
    for seed in range(300):
        draw = random.Random(seed)
        layers, runs = draw.randint(2, 9), draw.randint(1, 4)
        if runs > layers:
            continue
        costs = []
        for _ in range(runs):
            speed, kinds = draw.choice([1.0, 2.0, 3.7]), [draw.uniform(0.5, 2.0) for _ in range(2)]
            nbytes = [draw.randint(1, 9) for _ in range(layers)]
            costs.append(
                StageCosts(
                    seconds=[speed * kinds[index % 3 == 0] for index in range(layers)],
                    nbytes=nbytes,
                    room_bytes=draw.choice([10**6, draw.randint(5, 60)]),
                    before_s=draw.choice([0.0, 1.3]),
                    after_s=draw.choice([0.0, 2.9]),
                )
            )
        found = divide_layers(costs)
        assert (len(found), sum(found)) == (runs, layers)
        assert min(found) >= 1
        best = min(slowest(costs, sizes)[0] for sizes in every(layers, runs))
        if best == float("inf"):
            continue
        longest, total = slowest(costs, found)
        assert longest <= best * (1 + 1e-9), seed
        least = min(
            slowest(costs, sizes)[1] for sizes in every(layers, runs) if slowest(costs, sizes)[0] <= best * (1 + 1e-9)
        )
        assert total <= least * (1 + 1e-4), seed


def test_equal_layers_beside_ends_are_divided_as_well_as_in_any_division() -> None:
    draw = random.Random(7)
    for _ in range(100):
        runs = draw.randint(2, 5)
        layers, before, after = draw.randint(runs, 10), draw.uniform(0, 2), draw.uniform(0, 4)
        costs = [alike(1.0, layers, before_s=before, after_s=after)] * runs
        found = divide_equal_layers(layers, runs, before=before, after=after)
        assert sum(found) == layers
        assert min(found) >= 1
        assert slowest(costs, found)[0] <= min(slowest(costs, sizes)[0] for sizes in every(layers, runs)) + 1e-12
    assert divide_equal_layers(32, 8, before=0.1, after=2.5) == (4, 4, 4, 4, 4, 5, 5, 2)
