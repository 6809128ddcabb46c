"""Points of layers: each layer at one, chosen from the fractions of a solved linear program.

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

from memo.mip.activation.layer_groups import Sharing
from memo.mip.activation.linear_program import PlanModel

if TYPE_CHECKING:
    from memo.mip.activation.linear_program import Solution
    from memo.mip.inputs.profile import LayerProfile, PointProfile

NOTHING = 1e-6
"""Fraction of a layer at a point below which it is a solver's error."""

MOST_CHANGES = 32
"""Changes of a choice that are tried, each of which solves the program once."""
CLOSE = 1e-3
"""Part of the objective of fractions within which a choice is not changed further."""

_Points = tuple[str, ...]
_Change = Mapping[int, str]
"""Another point for some layers."""


def round_points(model: PlanModel) -> Solution | None:
    """Rounds a solved program's points.

    Returns:
        The best solution that was tried; None if no choice is within the budgets.
    """
    unshared = _unshared(model)
    best = min(_rounded(model, unshared), key=lambda tried: tried.objective, default=None)
    return None if best is None else _improved(unshared, best, enough=model.objective * (1 + CLOSE))


def can_round(model: PlanModel) -> bool:
    """Whether some choice that a solved program's fractions say is within the budgets."""
    return any(True for _ in _rounded(model, _unshared(model)))


def at_points(model: PlanModel) -> Solution | None:
    """The solution with the points of a solved program with integers."""
    return _unshared(model).at([max(of, key=of.__getitem__) for of in model.fractions()])


def _unshared(model: PlanModel) -> PlanModel:
    return PlanModel(model.problem, staying=model.staying, relaxed=model.relaxed, sharing=Sharing.NONE)


def _rounded(model: PlanModel, unshared: PlanModel) -> Iterator[Solution]:
    layers, fractions = model.problem.profile.layer_profiles(), model.fractions()
    pairs = zip(layers, fractions, strict=True)
    used = [[point for point in layer.points if of[point.name] > NOTHING] for layer, of in pairs]
    choices: list[_Points] = [tuple(points[end].name for points in used) for end in (-1, 0)]
    choices += [_carried(layers, fractions, used, nearest=nearest) for nearest in (False, True)]
    return (tried for choice in dict.fromkeys(choices) if (tried := unshared.at(choice)) is not None)


def _improved(unshared: PlanModel, best: Solution, *, enough: float) -> Solution:
    """The best solution found by changing the points of one."""
    names, left, gains = unshared.problem.profile.layers, MOST_CHANGES, True
    while gains and best.objective > enough:
        gains = False
        for change in itertools.islice(_changes(names, best), left):
            left -= 1
            tried = unshared.at([change.get(number, point) for number, point in enumerate(best.points)])
            if tried is not None and tried.objective < best.objective * (1 - NOTHING):
                best, gains = tried, True
                break
    return best


def _changes(classes: Sequence[str], now: Solution) -> Iterator[_Change]:
    """Changes that may gain: of ever fewer layers at once, then of one or two layers, the lowest bound first."""
    bounds = now.changes
    lowest = [min(of_layer, key=of_layer.__getitem__) for of_layer in bounds]
    gaining = [number for number, point in enumerate(lowest) if bounds[number][point] < -NOTHING]
    gaining.sort(key=lambda number: bounds[number][lowest[number]])
    count = len(gaining)
    while count > 1:
        yield {number: lowest[number] for number in gaining[:count]}
        count //= 2
    ones: dict[tuple[str, str, str], tuple[float, int]] = {}  # the best one of layers that are alike
    for number, at_now in enumerate(now.points):
        names = list(bounds[number])
        at = names.index(at_now)
        for point in dict.fromkeys((*names[max(at - 1, 0) : at], *names[at + 1 : at + 2], lowest[number])):
            kind, one = (classes[number], at_now, point), (bounds[number][point], number)
            ones[kind] = min(one, ones.get(kind, one))
    found = [(bound, {number: point}) for (_, _, point), (bound, number) in ones.items()]
    found += [
        (one + other, {first: point, second: to})
        for ((_, _, point), (one, first)), ((_, _, to), (other, second)) in itertools.combinations(ones.items(), 2)
        if first != second
    ]
    yield from (change for bound, change in sorted(found, key=lambda pair: pair[0]) if bound < -NOTHING)


def _carried(
    layers: Sequence[LayerProfile],
    fractions: Sequence[Mapping[str, float]],
    used: Sequence[Sequence[PointProfile]],
    *,
    nearest: bool,
) -> _Points:
    """Points by bytes: what one layer saves less than its fractions say, the next one of its class may save more."""
    lacking: dict[str, float] = {}
    chosen = []
    for layer, of, points in zip(layers, fractions, used, strict=True):
        asked = sum(point.saved_bytes * of[point.name] for point in layer.points) + lacking.get(layer.name, 0.0)
        if nearest:
            point = min(points, key=lambda point: abs(point.saved_bytes - asked))
        else:
            fitting = (point for point in points if point.saved_bytes <= asked + NOTHING * layer.full_bytes)
            point = next(fitting, points[-1])
        lacking[layer.name] = asked - point.saved_bytes
        chosen.append(point.name)
    return tuple(chosen)
