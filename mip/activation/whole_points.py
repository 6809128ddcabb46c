"""Points of layers that cannot be divided: each layer at one, chosen from the fractions of a solved linear program.

Owns the choice alone. A few choices are tried, and for each the program is solved again with these points given, so that
all its rows hold and the bytes of each tier are the best for them:

    each layer at the last of its points, or at the first            what a program over equal layers would say
    carried, from below      no more bytes than the fractions say, over all layers of a class so far
    carried, to the nearest  as many bytes as the fractions say, within half of a step
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from memo.mip.activation.linear_program import Model

if TYPE_CHECKING:
    from memo.mip.activation.plan import LayerPlan
    from memo.mip.inputs.profile import LayerProfile, PointProfile

__all__ = ["at_points", "round_points"]

NOTHING = 1e-6
"""Fraction of a layer at a point below which it is a solver's error."""

_Points = tuple[str | None, ...]


def round_points(model: Model) -> Model | None:
    """Rounds a solved program's points.

    Returns:
        The solved program of the best choice that was tried; None if no choice is within the budgets.
    """
    layers, plans = model.problem.profile.layer_profiles(), model.layer_plans()
    used = [_used(layer, plan) for layer, plan in zip(layers, plans, strict=True)]
    choices: list[_Points] = [tuple(None if points is None else points[end].name for points in used) for end in (-1, 0)]
    choices += [_carried(layers, plans, used, nearest=nearest) for nearest in (False, True)]
    solved = [tried for choice in dict.fromkeys(choices) if (tried := _again(model, choice)).solve()]
    return min(solved, key=lambda tried: tried.objective, default=None)


def at_points(model: Model) -> Model:
    """The program of a solution in which each layer that cannot be divided is at one point, with these points given."""
    layers, plans = model.problem.profile.layer_profiles(), model.layer_plans()
    pairs = zip(layers, plans, strict=True)
    return _again(model, tuple(None if layer.divisible else next(iter(plan.points)) for layer, plan in pairs))


def _again(model: Model, points: _Points) -> Model:
    return Model(
        model.problem,
        staying=model.staying,
        relaxed=model.relaxed,
        points=points,
        pieces=model.pieces,
        hides_storages=model.hides_storages,
    )


def _used(layer: LayerProfile, plan: LayerPlan) -> list[PointProfile] | None:
    """Points that the fractions of a layer mix, in the order of its class; None if it can be divided."""
    if layer.divisible:
        return None
    return [point for point in layer.points if plan.fraction(point.name) > NOTHING]


def _carried(
    layers: Sequence[LayerProfile],
    plans: Sequence[LayerPlan],
    used: Sequence[list[PointProfile] | None],
    *,
    nearest: bool,
) -> _Points:
    """Points by bytes: what one layer saves less than its fractions say, the next one of its class may save more."""
    lacking: dict[str, float] = {}
    chosen: list[str | None] = []
    for layer, plan, points in zip(layers, plans, used, strict=True):
        if points is None:
            chosen.append(None)
            continue
        asked = plan.saved_bytes(layer) - layer.fixed_bytes + lacking.get(layer.name, 0.0)
        if nearest:
            point = min(points, key=lambda point: abs(point.saved_bytes - asked))
        else:
            fitting = (point for point in points if point.saved_bytes <= asked + NOTHING * layer.full_bytes)
            point = next(fitting, points[-1])
        lacking[layer.name] = asked - point.saved_bytes
        chosen.append(point.name)
    return tuple(chosen)
