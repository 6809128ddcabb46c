"""Division of a model's layers over pipeline stages of different speed and memory.

Owns the search alone: exact, by dynamic programming over the layers. The slowest stage is as short as possible; of the
divisions for which that holds, the one with the shortest sum, and then the most even one, is taken.

    f(p, j) = min over i < j of max(f(p - 1, i), cost of layers i to j - 1 on stage p)
"""

from __future__ import annotations

import dataclasses
import heapq
import itertools
import math
from collections.abc import Callable, Sequence

EVENNESS = 1e-6
"""Weight of a run's square against its seconds, which chooses the more even of divisions with equal sums."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """Seconds and bytes of each layer on the machine of one run of consecutive layers."""

    seconds: Sequence[float]
    """Seconds of a microbatch, by layer of the model."""
    nbytes: Sequence[int]
    """Static bytes, by layer."""
    room_bytes: int
    """For static bytes on its device."""
    before_s: float = 0.0
    """Seconds of the embedding on this machine; counts for the first run."""
    after_s: float = 0.0
    """Seconds of the head, likewise for the last one."""


def divide_layers(costs: Sequence[StageCosts]) -> tuple[int, ...]:
    """Numbers of layers of each run, at least one, so that the slowest one is shortest.

    Static bytes are kept within the room where that is possible at all, and else not looked at.

    Args:
        costs: of each run, in the order of the layers, of at least as many layers as there are runs.
    """
    found = _divide(costs, bounded=True)
    return found if found is not None else _divide(costs, bounded=False) or ()


def divide_equal_layers(layers: int, runs: int, *, before: float, after: float) -> tuple[int, ...]:
    """Numbers of layers of each run, at least one, so that the slowest one is shortest, where all layers are alike.

    Args:
        layers: number of layers, at least as many as runs.
        runs: number of runs.
        before: time of the embedding, in units of a layer's.
        after: time of the head, likewise.
    """
    counts = [1] * runs
    times = [(1.0 + before * (run == 0) + after * (run == runs - 1), -run) for run in range(runs)]
    heapq.heapify(times)
    for _ in range(layers - runs):  # to the shortest run, which is no longer then than the slowest must be
        time, back = times[0]
        counts[-back] += 1  # of equal ones the last, which holds the fewest microbatches
        heapq.heapreplace(times, (time + 1.0, back))
    return tuple(counts)


def _divide(costs: Sequence[StageCosts], *, bounded: bool) -> tuple[int, ...] | None:
    count, layers = len(costs), len(costs[0].seconds)
    time = [list(itertools.accumulate(run.seconds, initial=0.0)) for run in costs]
    held = [list(itertools.accumulate(run.nbytes, initial=0)) for run in costs]

    def cost(run: int, first: int, end: int) -> float:
        if bounded and held[run][end] - held[run][first] > costs[run].room_bytes:
            return math.inf
        seconds = time[run][end] - time[run][first]
        return seconds + (costs[run].before_s if run == 0 else 0.0) + (costs[run].after_s if run == count - 1 else 0.0)

    # The shortest slowest run. The more layers a run has, the longer it is, so the search ends with the first too long.
    best = [math.inf] * (layers + 1)
    best[0] = 0.0
    for run in range(count):
        ahead, best = best, [math.inf] * (layers + 1)
        for end in range(run + 1, layers - (count - 1 - run) + 1):
            for first in range(end - 1, run - 1, -1):
                seconds = cost(run, first, end)
                if seconds >= best[end]:
                    break
                best[end] = min(best[end], max(ahead[first], seconds))
    bound = best[layers]
    if bound == math.inf:
        return None
    return _shortest_sum(cost, count, layers, bound * (1 + 1e-12))


def _shortest_sum(cost: Callable[[int, int, int], float], count: int, layers: int, bound: float) -> tuple[int, ...]:
    """Returns of the divisions whose runs are within the bound the one with the shortest sum, then the most even one."""
    sums: list[list[tuple[float, int]]] = []
    before = {0: 0.0}
    for run in range(count):
        reached: dict[int, tuple[float, int]] = {}
        for first, total in before.items():
            for end in range(first + 1, layers - (count - 1 - run) + 1):
                seconds = cost(run, first, end)
                if seconds > bound:
                    break
                known = total + seconds + EVENNESS * seconds * seconds / (bound or 1.0)
                if end not in reached or known < reached[end][0]:
                    reached[end] = (known, first)
        sums.append([reached.get(end, (math.inf, 0)) for end in range(layers + 1)])
        before = {end: total for end, (total, _) in reached.items()}
    sizes, end = [], layers
    for run in reversed(range(count)):
        first = sums[run][end][1]
        sizes.append(end - first)
        end = first
    return tuple(reversed(sizes))
