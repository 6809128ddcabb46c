"""Drawings of an address plan for the HTML report: one rectangle for each buffer.

Knows the data types of an address plan, not their files. A plan with more than MAX_RECTANGLES is thinned to the largest
bytes × time, and the drawing says so.
"""

from __future__ import annotations

from typing import Any

from memo.mip.address import AddressPlan

MAX_RECTANGLES = 60_000


def address_plan_drawings(
    plan: AddressPlan, *, title: str, max_rectangles: int = MAX_RECTANGLES
) -> list[dict[str, Any]]:
    """Builds one drawing for each arena, ready for json.

    Args:
        plan: the address plan.
        title: shown above each drawing.
        max_rectangles: of each drawing; beyond, the largest bytes × time are drawn.
    """
    return [_arena(plan, arena.name, title, max_rectangles) for arena in plan.arenas]


def _arena(plan: AddressPlan, name: str, title: str, room: int) -> dict[str, Any]:
    arena = plan.arena(name)
    rectangles = [
        {"name": buffer.id, "offset": offset, "nbytes": buffer.nbytes, "start": buffer.start, "end": buffer.end}
        for buffer, offset in zip(plan.problem.buffers, plan.offsets, strict=True)
        if buffer.arena == name and buffer.nbytes
    ]
    drawn = sorted(rectangles, key=_weight, reverse=True)[:room]
    thinned = None
    if len(drawn) < len(rectangles):
        thinned = f"the {len(drawn):,} of {len(rectangles):,} rectangles with the largest bytes × time"
    return {
        "title": title,
        "arena": name,
        "status": f"{arena.status.value}, {arena.method}",
        "unit": "instant",
        "peak_nbytes": arena.nbytes,
        "lower_bound_nbytes": arena.lower_bound_nbytes,
        "capacity_nbytes": plan.problem.capacities.get(name),
        "thinned": thinned,
        "buffers": drawn,
    }


def _weight(rectangle: dict[str, Any]) -> int:
    weight: int = rectangle["nbytes"] * (rectangle["end"] - rectangle["start"])
    return weight
