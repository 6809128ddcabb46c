"""Bi-level address planning: each layer pass is packed separately, then the step with every pass as one pseudo-buffer.

Level 1 packs the buffers of each group, where they live only within it; identical groups, such as the layers of a
transformer, are solved once. Level 2 packs the pseudo-buffers with all other buffers. The result cannot beat the best
flat placement, but may be found where that one is not, so it is offered as an incumbent. Bi-level formulation: MEMO,
SIGMOD 2025.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from memo.mip.address.instance import make_instance
from memo.mip.address.milp import solve_flat
from memo.mip.address.portfolio import ArenaSolver
from memo.mip.address.problem import Buffer

LEVEL_1_SHARE = 0.25
"""Share of the remaining time for all groups together, and the same for level 2."""

Shape = tuple[tuple[int, int, int, int], ...]


def solve_by_layers(solver: ArenaSolver, buffers: Sequence[Buffer], *, alignment: int, deadline: float) -> None:
    """Offers the bi-level placement to a solver as incumbent.

    Args:
        solver: its instance is of these buffers in this order.
        buffers: of one arena, none of zero bytes.
        alignment: the problem's, in bytes.
        deadline: in seconds of `time.monotonic`.
    """
    groups: dict[str, list[int]] = {}
    outside: list[int] = []
    for index, buffer in enumerate(buffers):
        (groups.setdefault(buffer.group, []) if buffer.group else outside).append(index)
    left = deadline - time.monotonic()
    level_1 = _pack_groups(buffers, groups, alignment, time.monotonic() + left * LEVEL_1_SHARE)
    pseudo = [
        Buffer(
            id=f"group {name}",
            start=min(buffers[i].start for i in members),
            end=max(buffers[i].end for i in members),
            nbytes=level_1[name][0],
            alignment=max(buffers[i].alignment for i in members),
        )
        for name, members in groups.items()
    ]
    step = make_instance([*pseudo, *(buffers[i] for i in outside)], alignment=alignment)
    level_2 = ArenaSolver(step)
    solve_flat(level_2, deadline=time.monotonic() + left * LEVEL_1_SHARE)
    offsets = [0] * len(buffers)
    for (name, members), base in zip(groups.items(), level_2.offsets, strict=False):
        for index, inner in zip(members, level_1[name][1], strict=True):
            offsets[index] = base * step.unit + inner
    for index, at in zip(outside, level_2.offsets[len(groups) :], strict=True):
        offsets[index] = at * step.unit
    unit = solver.instance.unit
    solver.offer(tuple(offset // unit for offset in offsets), f"bi-level, {len(groups)} groups")


def _pack_groups(
    buffers: Sequence[Buffer], groups: dict[str, list[int]], alignment: int, deadline: float
) -> dict[str, tuple[int, list[int]]]:
    """For each group its size in bytes and its members' offsets within it; groups of one shape are solved once."""
    known: dict[Shape, tuple[int, list[int]]] = {}
    packed = {}
    for name, members in groups.items():
        first = min(buffers[i].start for i in members)
        parts = [buffers[i] for i in members]
        shape = tuple((b.start - first, b.end - first, b.nbytes, b.alignment) for b in parts)
        if shape not in known:
            instance = make_instance(parts, alignment=alignment)
            level_1 = ArenaSolver(instance)
            solve_flat(level_1, deadline=deadline)
            height = (level_1.upper or 0) * instance.unit
            known[shape] = height, [offset * instance.unit for offset in level_1.offsets]
        packed[name] = known[shape]
    return packed
