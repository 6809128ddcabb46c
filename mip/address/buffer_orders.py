"""Orders in which buffers are tried: the named orders of the portfolio, and an endless seeded stream for the search.

An order does not change what a search can find: every search is complete in every order. Hard instances are solved
within a few thousand nodes in some orders and not at all in others, so many short searches beat a long one. The stream
mixes the logarithms of a buffer's width, size and largest load with varying weights, and moves forward the buffers of
sections in which earlier searches failed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence

from memo.mip.address.instance import Instance

GOLDEN = 0.6180339887498949
"""Golden ratio: its multiples modulo 1 cover the unit interval evenly, however many there are."""
BY_SIZE = (0.3, 1.1)
"""Range of the size's weight relative to the width's; weights outside hardly ever succeed on hard instances."""

Key = Callable[[int], tuple[int, ...]]


def portfolio_orders(instance: Instance) -> Iterator[tuple[str, list[int]]]:
    """Yields (name, buffer indices) of the orders for greedy fit, the best one for large instances first."""
    width, sizes = _widths(instance), instance.sizes
    start = [first for first, _ in instance.spans]
    keys: dict[str, Key] = {
        "size, start": lambda i: (-sizes[i], start[i], i),
        "width": lambda i: (-width[i], -sizes[i], i),
        "peak load": lambda i: (-instance.peaks[i], -width[i] * sizes[i], i),
        "size": lambda i: (-sizes[i], -width[i], i),
        "area": lambda i: (-width[i] * sizes[i], i),
        "peak load, start": lambda i: (-instance.peaks[i], start[i], -sizes[i], i),
    }
    for name, key in keys.items():
        yield name, sorted(range(instance.n), key=key)


def search_orders(instance: Instance, *, seed: int, conflicts: Sequence[int]) -> Iterator[list[int]]:
    """Yields orders of buffer indices without end.

    Args:
        instance: the buffers.
        seed: of the random weights.
        conflicts: number of failures by section; read again for each order.
    """
    width, peak, sizes = _widths(instance), instance.peaks, instance.sizes
    named: tuple[Key, ...] = (
        lambda i: (-width[i], -width[i] * sizes[i], -peak[i], i),
        lambda i: (-peak[i], -width[i] * sizes[i], -width[i], i),
        lambda i: (-peak[i], -width[i], -width[i] * sizes[i], i),
    )
    for key in named:
        yield sorted(range(instance.n), key=key)
    logs = [(math.log(w), math.log(s), math.log(p)) for w, s, p in zip(width, sizes, peak, strict=True)]
    draw = random.Random(seed)
    ratio = draw.random()
    while True:
        ratio = (ratio + GOLDEN) % 1.0
        by_size = BY_SIZE[0] + (BY_SIZE[1] - BY_SIZE[0]) * ratio
        by_peak = 6 * draw.random() * (draw.random() < 0.5)
        by_conflict = 1.5 * draw.random() * (draw.random() < 0.7)
        noise = 0.2 * draw.random() * (draw.random() < 0.25)
        most = max(1, *conflicts)
        score = [w + by_size * s + by_peak * p + noise * (draw.random() - draw.random()) for w, s, p in logs]
        if by_conflict:
            for i, (first, last) in enumerate(instance.spans):
                score[i] += by_conflict * max(conflicts[first:last]) / most
        yield sorted(range(instance.n), key=lambda i: (-score[i], i))


def _widths(instance: Instance) -> list[int]:
    """Number of sections of each buffer."""
    return [last - first for first, last in instance.spans]
