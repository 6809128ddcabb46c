"""Text tables of address plans, shared by `memo pack`, `memo check` and `memo show`."""

from __future__ import annotations

from typing import Any

from memo.mip.address import AddressPlan, Buffer
from memo.trace import printable
from memo.units import format_bytes, text_table


def arena_table(plan: AddressPlan) -> str:
    """Table with one line per arena, then the five buffers of the largest bytes x lifetime."""
    rows = []
    for arena in plan.arenas:
        capacity = plan.problem.capacities.get(arena.name)
        rows.append(
            (
                printable(arena.name),
                f"{len(plan.problem.of(arena.name)):,}",
                format_bytes(arena.nbytes),
                format_bytes(arena.lower_bound_nbytes),
                f"{arena.gap:.2%}",
                "-" if capacity is None else format_bytes(capacity),
                "-" if not capacity else f"{1 - arena.nbytes / capacity:.1%}",
                arena.status.value,
                printable(arena.method),
            )
        )
    header = ("arena", "buffers", "size", "lower bound", "gap", "capacity", "headroom", "status", "found by")
    heavy = sorted(plan.problem.buffers, key=lambda b: (-_weight(b), b.id))[:5]
    top = [(printable(b.id), format_bytes(b.nbytes), f"{b.start}", f"{b.end}") for b in heavy]
    return f"{text_table(header, rows)}\n\n{text_table(('bytes x life, top 5', 'size', 'start', 'end'), top)}"


def plan_summary(plan: AddressPlan) -> dict[str, Any]:
    """Object that `--json` prints; sizes in bytes."""
    return {
        "status": plan.status.value,
        "buffers": len(plan.problem.buffers),
        "alignment_nbytes": plan.problem.alignment,
        "arenas": [
            {
                "name": arena.name,
                "buffers": len(plan.problem.of(arena.name)),
                "nbytes": arena.nbytes,
                "lower_bound_nbytes": arena.lower_bound_nbytes,
                "gap_fraction": arena.gap,
                "capacity_nbytes": plan.problem.capacities.get(arena.name),
                "status": arena.status.value,
                "method": arena.method,
            }
            for arena in plan.arenas
        ],
    }


def _weight(buffer: Buffer) -> int:
    return buffer.nbytes * (buffer.end - buffer.start)
