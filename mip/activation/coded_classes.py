"""Classes of layers as a linear program takes them where a codec is chosen.

How many bytes codes spare depends on a layer's points: at point `all` what is saved at every point is coded, too, and else
it moves whole. A row that multiplies the moved fraction by that is not linear. So a program takes one fixed share for each
class: exactly that of a class with one point, and else the least of any point, so that what it finds fits. The solver
then solves variants of the problem, whose answers are predicted by the rules and the shortest taken:

    as it is               each layer free; recomputed ones are thought to move whole, and to take the time of coding
    whole                  no layer recomputes, so that every share is exact
    as found               layers that the best answer left whole are left whole, the others take the share found there
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from memo.mip.activation.plan import ActivationProblem, LayerPlan
from memo.mip.inputs.profile import ALL, LayerProfile

__all__ = [
    "is_coded",
    "least_spared_share",
    "most_spared",
    "most_spared_share",
    "taken_as_found",
    "undivided",
    "with_classes",
    "with_layers",
]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _TakenAs(LayerProfile):
    """A class of which codes are taken to spare one share, whatever its points."""

    share: float

    def spared_bytes(self, points: Mapping[str, float]) -> float:
        """Bytes by which what is saved is taken to be fewer."""
        return self.share * (self.fixed_bytes + sum(p.saved_bytes * points.get(p.name, 0.0) for p in self.points))


def is_coded(problem: ActivationProblem) -> bool:
    """Whether codes spare bytes of any layer."""
    return any(layer.spared_bytes({ALL: 1.0}) for layer in problem.profile.classes)


def least_spared_share(layer: LayerProfile) -> float:
    """The share of the saved bytes that codes spare at least, whichever points a layer is at."""
    return 0.0 if layer.coding is None else min(_shares(layer))


def most_spared_share(layer: LayerProfile) -> float:
    """The share of the saved bytes that codes spare at most, whichever points a layer is at."""
    return 0.0 if layer.coding is None else max(_shares(layer))


def _shares(layer: LayerProfile) -> list[float]:
    saved = ((point.name, layer.fixed_bytes + point.saved_bytes) for point in layer.points)
    return [layer.spared_bytes({name: 1.0}) / nbytes if nbytes else 0.0 for name, nbytes in saved]


def undivided(layer: LayerProfile) -> LayerProfile:
    """The class with point `all` alone, where nothing is recomputed and nothing stands beside a layer."""
    whole = dataclasses.replace(layer.points[0], beside_bytes=0)
    return dataclasses.replace(layer, name=f"{layer.name}, whole", points=(whole,))


def most_spared(layer: LayerProfile) -> LayerProfile:
    """The class with the largest share of any point at all of them: no plan moves fewer bytes."""
    return layer if layer.coding is None else _taken_as(layer, layer.name, most_spared_share(layer))


def taken_as_found(problem: ActivationProblem, plans: Sequence[LayerPlan]) -> ActivationProblem:
    """The problem with whole classes for layers that these plans leave whole, and with the least share found for others."""
    known = problem.profile.layer_profiles()
    shares: dict[str, float] = {}
    for layer, plan in zip(known, plans, strict=True):
        if plan.recomputes:
            shares[layer.name] = min(shares.get(layer.name, 1.0), plan.coded_share(layer))
    return with_layers(
        problem,
        [
            _taken_as(layer, layer.name, shares[layer.name]) if plan.recomputes else undivided(layer)
            for layer, plan in zip(known, plans, strict=True)
        ],
    )


def _taken_as(layer: LayerProfile, name: str, share: float) -> LayerProfile:
    fields = {field.name: getattr(layer, field.name) for field in dataclasses.fields(LayerProfile)}
    return _TakenAs(**{**fields, "name": name}, share=share)


def with_classes(problem: ActivationProblem, changed: Callable[[LayerProfile], LayerProfile]) -> ActivationProblem:
    """The problem with each class changed."""
    profile = problem.profile
    classes = {layer.name: changed(layer) for layer in profile.classes}
    profile = dataclasses.replace(
        profile, classes=tuple(classes.values()), layers=tuple(classes[name].name for name in profile.layers)
    )
    return dataclasses.replace(problem, profile=profile)


def with_layers(problem: ActivationProblem, layers: Sequence[LayerProfile]) -> ActivationProblem:
    """The problem with these classes of its layers; of one name are equal ones."""
    classes = {layer.name: layer for layer in layers}
    names = tuple(layer.name for layer in layers)
    profile = dataclasses.replace(problem.profile, classes=tuple(classes.values()), layers=names)
    return dataclasses.replace(problem, profile=profile)
