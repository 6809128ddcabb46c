"""Small random address-planning problems, and the exhaustive search that knows their best arena."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

from memo.mip.address import AddressProblem, Buffer

HORIZON = 8


def random_problem(seed: int, *, n: int) -> AddressProblem:
    """Up to n buffers with, at random, alignments, fixed offsets and gaps."""
    draw = random.Random(seed)
    buffers = []
    for index in range(draw.randint(1, n)):
        start = draw.randrange(HORIZON - 1)
        end = draw.randint(start + 1, HORIZON)
        gaps = ()
        if end - start > 3 and draw.random() < 0.3:
            a = draw.randint(start + 1, end - 2)
            gaps = ((a, draw.randint(a + 1, end - 1)),)
        buffers.append(
            Buffer(
                id=str(index),
                start=start,
                end=end,
                nbytes=draw.randint(1, 9),
                alignment=draw.choice((1, 1, 1, 2, 4)) if seed % 3 == 0 else 1,
                gaps=gaps if seed % 4 == 0 else (),
                fixed_offset=4 if index == 0 and seed % 5 == 0 else None,
            )
        )
    return AddressProblem(buffers=tuple(buffers), alignment=draw.choice((1, 1, 2, 3)) if seed % 5 else 1)


def smallest_arena(problem: AddressProblem) -> int:
    """The least arena, by dropping the buffers from above in every order there is."""
    orders = itertools.permutations(problem.buffers)
    heights = (height for order in orders if (height := _dropped(order, problem.alignment)) is not None)
    return min(heights)


def _dropped(order: Sequence[Buffer], alignment: int) -> int | None:
    top = [0] * HORIZON
    for buffer in order:
        instants = [t for a, b in buffer.spans() for t in range(a, b)]
        at = max(top[t] for t in instants)
        while at % alignment or at % buffer.alignment:
            at += 1
        if buffer.fixed_offset is not None:
            if at > buffer.fixed_offset:
                return None
            at = buffer.fixed_offset
        for t in instants:
            top[t] = at + buffer.nbytes
    height = max(top)
    return -(-height // alignment) * alignment
