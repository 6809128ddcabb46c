"""Division of a model's layers over pipeline stages of different speed and memory.

Owns the search alone: exact, by dynamic programming over the layers. The slowest stage is as short as possible; of the
divisions for which that holds, the one with the shortest sum, and then the most even one, is taken.

    f(p, j) = min over i < j of max(f(p - 1, i), cost of layers i to j - 1 on stage p)
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

__all__ = ["StageCosts", "divide_layers"]

MOST_CHOICES = 20_000_000
"""Product of stages and squared layers up to which the sum is minimised, too."""
EVENNESS = 1e-6


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StageCosts:
    """Seconds and bytes of each layer on the machine of one run of consecutive layers."""

    seconds: Sequence[float]
    """Of a microbatch, by layer of the model."""
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


def _divide(costs: Sequence[StageCosts], *, bounded: bool) -> tuple[int, ...] | None:
    count, layers = len(costs), len(costs[0].seconds)
    time = [list(itertools.accumulate(run.seconds, initial=0.0)) for run in costs]
    held = [list(itertools.accumulate(run.nbytes, initial=0)) for run in costs]

    def cost(run: int, first: int, end: int) -> float:
        if bounded and held[run][end] - held[run][first] > costs[run].room_bytes:
            return math.inf
        seconds = time[run][end] - time[run][first]
        return seconds + (costs[run].before_s if run == 0 else 0.0) + (costs[run].after_s if run == count - 1 else 0.0)

    # The shortest slowest run. With more layers before it, a run gets shorter and those before it longer.
    best = [math.inf] * (layers + 1)
    best[0] = 0.0
    for run in range(count):
        ahead, best = best, [math.inf] * (layers + 1)
        for end in range(run + 1, layers - (count - 1 - run) + 1):
            low, high = run, end - 1
            while low < high:
                middle = (low + high) // 2
                if ahead[middle] >= cost(run, middle, end):
                    high = middle
                else:
                    low = middle + 1
            best[end] = min(max(ahead[at], cost(run, at, end)) for at in {max(low - 1, run), low})
    bound = best[layers]
    if bound == math.inf:
        return None
    return _shortest_sum(cost, count, layers, bound * (1 + 1e-12))


def _shortest_sum(cost, count: int, layers: int, bound: float) -> tuple[int, ...]:  # type: ignore[no-untyped-def]
    """Of the divisions whose runs are all within the bound, the one with the shortest sum, then the most even one."""
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
