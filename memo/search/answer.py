"""Answer of a search in numbers: the items that a step is made of, and those by which the best beats the others.

Owns the comparison. Its rows are the runner-up, and of every other family of layouts the best one; where that was never
planned, the bound that proves it slower.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memo.mip.activation import ActivationPlan
    from memo.search.bounds import Bound
    from memo.search.candidates import Shape
    from memo.search.search import Found, Planned


class Item(enum.StrEnum):
    """What a step's time is spent on, on the slowest stage."""

    COMPUTE = "compute"
    RECOMPUTE = "recompute"
    COMMUNICATION = "communication"
    """Compute waits for collectives: of tensor and context parallelism, and of weights where nothing hides them."""
    STALL = "stall"
    """Compute waits for copies to or from host memory and disk."""
    BUBBLE = "bubble"
    """The stage waits for others."""
    REDUCTION = "reduction"
    """After the last backward, until gradients are reduced."""
    OPTIMIZER = "optimizer"
    """The optimizer's step, and gathers of the weights it has updated."""


def step_items(plan: ActivationPlan) -> dict[Item, float]:
    """Seconds of a step by item, which add up to it; of the slowest stage."""
    stage = max(plan.stages, key=lambda stage: stage.microbatch_s)
    times, profile = plan.problem.pipeline.microbatches, plan.problem.profile
    found = {
        Item.COMPUTE: times * stage.compute_s,
        Item.RECOMPUTE: times * stage.recompute_s,
        Item.COMMUNICATION: times * stage.communication_s,
        Item.STALL: times * stage.stall_s,
        Item.BUBBLE: 0.0,
        Item.REDUCTION: stage.sync_s,
        Item.OPTIMIZER: profile.optimizer_s + profile.optimizer_exchange_s,
    }
    found[Item.BUBBLE] = plan.step_s - math.fsum(found.values())
    return found


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """What the best is compared with."""

    family: str
    """The kinds of parallelism that it has; those of the best for the runner-up, if it has the same."""
    planned: Planned | None
    """None where no layout of the family was planned."""
    shape: Shape
    """Shape of `planned`, or of the lowest bound."""
    slower_s: float
    """Seconds by which its step is longer, or at least so many."""
    items: Mapping[Item, float]
    """Seconds by item by which its step is longer; empty where it was not planned."""
    kind: Bound | None = None
    """Kind of the lowest bound where it was not planned."""


def rivals(found: Found) -> list[Rival]:
    """The runner-up, and the best of each other family, in ascending order of their steps.

    Families of which nothing fits are left out.
    """
    best = found.best[0]
    rows = [_planned_rival(best, other) for other in found.best[1:2]]
    families: dict[str, Planned] = {}
    for planned in found.planned:
        families.setdefault(planned.candidate.shape.family, planned)
    lowest: dict[str, tuple[float, Shape, Bound]] = {}
    for closed in found.closed:
        for shape in closed.shapes:
            known = lowest.get(shape.family)
            if math.isfinite(closed.bound_s) and (known is None or closed.bound_s < known[0]):
                lowest[shape.family] = closed.bound_s, shape, closed.kind
    others = []
    for family in sorted({*families, *lowest} - {best.candidate.shape.family}):
        if family in families:
            others.append(_planned_rival(best, families[family]))
        else:
            bound_s, shape, kind = lowest[family]
            slower = bound_s - best.step_s
            others.append(Rival(family=family, planned=None, shape=shape, slower_s=slower, items={}, kind=kind))
    told = {rival.planned.candidate for rival in rows if rival.planned is not None}
    rows += [rival for rival in others if rival.planned is None or rival.planned.candidate not in told]
    return sorted(rows, key=lambda rival: rival.slower_s)


def _planned_rival(best: Planned, other: Planned) -> Rival:
    mine, theirs = step_items(best.plan), step_items(other.plan)
    return Rival(
        family=other.candidate.shape.family,
        planned=other,
        shape=other.candidate.shape,
        slower_s=other.step_s - best.step_s,
        items={item: theirs[item] - mine[item] for item in Item},
    )
