"""Small random address-planning problems, and the exhaustive search that knows their best arena."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

from memo.mip.address import AddressProblem, Buffer

HORIZON = 8


def random_problem(seed: int, *, n: int) -> AddressProblem:
    """Up to n buffers with, at random, alignments."""
    draw = random.Random(seed)
    buffers = []
    for index in range(draw.randint(1, n)):
        start = draw.randrange(HORIZON - 1)
        end = draw.randint(start + 1, HORIZON)
        buffers.append(
            Buffer(
                id=str(index),
                start=start,
                end=end,
                nbytes=draw.randint(1, 9),
                alignment=draw.choice((1, 1, 1, 2, 4)) if seed % 3 == 0 else 1,
            )
        )
    return AddressProblem(buffers=tuple(buffers), alignment=draw.choice((1, 1, 2, 3)) if seed % 5 else 1)


def smallest_arena(problem: AddressProblem) -> int:
    """The least arena, by dropping the buffers from above in every order there is."""
    return min(_dropped(order, problem.alignment) for order in itertools.permutations(problem.buffers))


def _dropped(order: Sequence[Buffer], alignment: int) -> int:
    top = [0] * HORIZON
    for buffer in order:
        at = max(top[buffer.start : buffer.end])
        while at % alignment or at % buffer.alignment:
            at += 1
        top[buffer.start : buffer.end] = [at + buffer.nbytes] * (buffer.end - buffer.start)
    height = max(top)
    return -(-height // alignment) * alignment
