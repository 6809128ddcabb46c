"""Points of layers that cannot be divided: each layer at one, chosen from the fractions of a solved linear program.

Owns the choice alone. A few choices are tried, and for each the program is solved again with these points given, so that
all its rows hold and the bytes of each tier are the best for them:

    each layer at the last of its points, or at the first            what a program over equal layers would say
    carried, from below      no more bytes than the fractions say, over all layers of a class so far
    carried, to the nearest  as many bytes as the fractions say, within half of a step

The best of them is then changed, at one layer, at two, or at many at once, while that gains: in the order of the bounds
that the program's reduced costs are. Where no bound is negative, no choice is better; nor is one much better than the
fractions. Where layers fit only beside smaller ones, no such choice may be good; the solver then asks a program with
integers (memo.mip.activation.solver).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from memo.mip.activation.linear_program import Model

if TYPE_CHECKING:
    from memo.mip.activation.plan import LayerPlan
    from memo.mip.inputs.profile import LayerProfile, PointProfile

__all__ = ["at_points", "round_points"]

NOTHING = 1e-6
"""Fraction of a layer at a point below which it is a solver's error."""

MOST_CHANGES = 32
"""Changes of a choice that are tried, each of which solves the program once."""
CLOSE = 1e-3
"""Part of the objective of fractions within which a choice is not changed further."""

_Points = tuple[str | None, ...]
_Change = Mapping[int, str]
"""Another point for some layers."""


def round_points(model: Model) -> Model | None:
    """Rounds a solved program's points.

    Returns:
        The solved program of the best choice that was tried; None if no choice is within the budgets.
    """
    layers, plans = model.problem.profile.layer_profiles(), model.layer_plans()
    used = [
        _used(layer, plan) if model.at_one_point(layer) else None for layer, plan in zip(layers, plans, strict=True)
    ]
    choices: list[_Points] = [tuple(None if points is None else points[end].name for points in used) for end in (-1, 0)]
    choices += [_carried(layers, plans, used, nearest=nearest) for nearest in (False, True)]
    solved = [(tried, choice) for choice in dict.fromkeys(choices) if (tried := _again(model, choice)).solve()]
    if not solved:
        return None
    return _improved(*min(solved, key=lambda pair: pair[0].objective), enough=model.objective * (1 + CLOSE))


def at_points(model: Model) -> Model:
    """The program of a solution in which each layer that cannot be divided is at one point, with these points given."""
    layers, plans = model.problem.profile.layer_profiles(), model.layer_plans()
    pairs = zip(layers, plans, strict=True)
    return _again(model, tuple(None if layer.divisible else next(iter(plan.points)) for layer, plan in pairs))


def _improved(best: Model, choice: _Points, *, enough: float) -> Model:
    """The best program found by changing the points of a solved one."""
    left, gains = MOST_CHANGES, True
    while gains and best.objective > enough:
        gains = False
        for change in itertools.islice(_changes(best, choice), left):
            left -= 1
            tried_choice = tuple(change.get(number, point) for number, point in enumerate(choice))
            tried = _again(best, tried_choice)
            if tried.solve() and tried.objective < best.objective * (1 - NOTHING):
                best, choice, gains = tried, tried_choice, True
                break
    return best


def _changes(model: Model, choice: _Points) -> Iterator[_Change]:
    """Changes that may gain: of ever fewer layers at once, then of one or two layers, the lowest bound first."""
    bounds = model.least_changes()
    free = [number for number, point in enumerate(choice) if point is not None]
    lowest = {number: min(bounds[number], key=bounds[number].__getitem__) for number in free}
    gaining = [number for number in free if bounds[number][lowest[number]] < -NOTHING]
    gaining.sort(key=lambda number: bounds[number][lowest[number]])
    count = len(gaining)
    while count > 1:
        yield {number: lowest[number] for number in gaining[:count]}
        count //= 2
    ones: dict[tuple[str, str | None, str], tuple[float, int]] = {}  # the best one of layers that are alike
    for number in free:
        names = list(bounds[number])
        at = names.index(choice[number] or "")
        for point in dict.fromkeys((*names[max(at - 1, 0) : at], *names[at + 1 : at + 2], lowest[number])):
            kind, one = (model.problem.profile.layers[number], choice[number], point), (bounds[number][point], number)
            ones[kind] = min(one, ones.get(kind, one))
    found = [(bound, {number: point}) for (_, _, point), (bound, number) in ones.items()]
    found += [
        (one + other, {first: point, second: to})
        for ((_, _, point), (one, first)), ((_, _, to), (other, second)) in itertools.combinations(ones.items(), 2)
        if first != second
    ]
    yield from (change for bound, change in sorted(found, key=lambda pair: pair[0]) if bound < -NOTHING)


def _again(model: Model, points: _Points) -> Model:
    return Model(
        model.problem,
        staying=model.staying,
        relaxed=model.relaxed,
        points=points,
        pieces=model.pieces,
        hides_storages=model.hides_storages,
        leaves_whole=model.leaves_whole,
    )


def _used(layer: LayerProfile, plan: LayerPlan) -> list[PointProfile]:
    """Points that the fractions of a layer mix, in the order of its class."""
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
