"""Orders in which buffers are tried: the fixed ones of the portfolio, and an endless seeded stream for the search.

An order decides nothing but luck: every search is complete in every order. Hard instances have orders in which they fall
within a few thousand nodes and others in which they do not fall at all, so many short searches beat a long one. The
stream mixes the logarithms of a buffer's width, size and largest load with varying weights, and pulls forward the
buffers of sections in which earlier searches failed.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence

from memo.mip.address.instance import Instance

__all__ = ["portfolio_orders", "search_orders"]

GOLDEN = 0.6180339887498949
"""Steps of this on the unit circle cover it evenly, whenever they stop."""
BY_SIZE = (0.3, 1.1)
"""Weight of the logarithm of the size to 1 of the width's; orders outside hardly ever succeed on hard instances."""

Key = Callable[[int], tuple[int, ...]]


def portfolio_orders(instance: Instance) -> Iterator[tuple[str, list[int]]]:
    """Named orders for greedy fit, the one by peak load first."""
    width, peak, sizes = _widths(instance), _peaks(instance), instance.sizes
    keys: dict[str, Key] = {
        "peak load": lambda i: (-peak[i], -width[i] * sizes[i], i),
        "area": lambda i: (-width[i] * sizes[i], i),
        "width": lambda i: (-width[i], -sizes[i], i),
        "peak load, start": lambda i: (-peak[i], instance.spans[i][0][0], -sizes[i], i),
        "size": lambda i: (-sizes[i], -width[i], i),
        "start": lambda i: (instance.spans[i][0][0], -width[i], i),
    }
    for name, key in keys.items():
        yield name, sorted(range(instance.n), key=key)


def search_orders(instance: Instance, *, seed: int, conflicts: Sequence[int]) -> Iterator[list[int]]:
    """Orders without end; `conflicts` counts failures by section and is read anew for each."""
    width, peak, sizes = _widths(instance), _peaks(instance), instance.sizes
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
            for i, spans in enumerate(instance.spans):
                score[i] += by_conflict * max(max(conflicts[a:b]) for a, b in spans) / most
        yield sorted(range(instance.n), key=lambda i: (-score[i], i))


def _widths(instance: Instance) -> list[int]:
    """Sections from a buffer's first to its last."""
    return [spans[-1][1] - spans[0][0] for spans in instance.spans]


def _peaks(instance: Instance) -> list[int]:
    """The largest load of any section a buffer lives in."""
    loads = instance.loads
    return [max(max(loads[a:b]) for a, b in spans) for spans in instance.spans]
