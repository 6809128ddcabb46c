"""Ratios of step times over many problems."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any


def compared(rows: Sequence[dict[str, Any]], names: Iterable[str], base: str) -> dict[str, dict[str, Any]]:
    """Each name's step over `base`'s: problems that it has a plan for, median, worst, best, and those above 1.01.

    Args:
        rows: with the seconds of each name under "step_s"; None where it has no plan, no entry where it is no question.
        names: the names.
        base: the name whose steps the others are divided by; rows without its step do not count.
    """
    told = {}
    for name in names:
        steps = [(row["step_s"][name], row["step_s"][base]) for row in rows if name in row["step_s"]]
        ratios = [one / other for one, other in steps if one and other]
        told[name] = {
            "fits": len(ratios),
            "of": len(steps),
            "median": statistics.median(ratios) if ratios else None,
            "worst": max(ratios, default=None),
            "best": min(ratios, default=None),
            "costs_more_than_1_percent": sum(ratio > 1.01 for ratio in ratios),
        }
    return told
