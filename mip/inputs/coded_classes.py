"""Classes of layers for the linear program of a plan with a codec: codes spare the same share at each of a layer's points.

The bytes that codes spare depend on a layer's points: at point `all` the bytes that every point saves are coded too, at any
other point they move whole. The product of moved fraction and spared share is not linear. So a program has one fixed share
for each class: the exact one of a class with one point, and the least of any point of other classes, so that its plan fits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from memo.mip.inputs.profile import LayerProfile

__all__ = ["least_spared_share", "most_spared_share", "undivided", "with_most_spared", "with_share"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _WithShare(LayerProfile):
    """A class of which codes spare the same share at every point."""

    share: float

    def spared_bytes(self, points: Mapping[str, float]) -> float:
        """Bytes that codes spare of the saved bytes, by the fixed share."""
        return self.share * (self.fixed_bytes + sum(p.saved_bytes * points.get(p.name, 0.0) for p in self.points))


def least_spared_share(layer: LayerProfile) -> float:
    """Least share, over the points, of the saved bytes that codes spare."""
    return 0.0 if layer.coding is None else min(_shares(layer))


def most_spared_share(layer: LayerProfile) -> float:
    """Largest share, over the points, of the saved bytes that codes spare."""
    return 0.0 if layer.coding is None else max(_shares(layer))


def _shares(layer: LayerProfile) -> list[float]:
    saved = ((point.name, layer.fixed_bytes + point.saved_bytes) for point in layer.points)
    return [layer.spared_bytes({name: 1.0}) / nbytes if nbytes else 0.0 for name, nbytes in saved]


def undivided(layer: LayerProfile) -> LayerProfile:
    """The class with point `all` alone: nothing is recomputed, and no bytes are held beside a layer."""
    whole = dataclasses.replace(layer.points[0], beside_bytes=0)
    return dataclasses.replace(layer, name=f"{layer.name}, whole", points=(whole,))


def with_most_spared(layer: LayerProfile) -> LayerProfile:
    """The class with its largest share at every point: a lower bound of the bytes that a plan moves."""
    return layer if layer.coding is None else with_share(layer, most_spared_share(layer))


def with_share(layer: LayerProfile, share: float) -> LayerProfile:
    """The class of which codes spare this share at every point."""
    fields = {field.name: getattr(layer, field.name) for field in dataclasses.fields(LayerProfile)}
    return _WithShare(**fields, share=share)
