"""Classes of layers as a linear program takes them where a codec is chosen.

How many bytes codes spare depends on a layer's points: at point `all` what is saved at every point is coded, too, and else
it moves whole. A row that multiplies the moved fraction by that is not linear. So a program takes one fixed share for each
class: exactly that of a class with one point, and else the least of any point, so that what it finds fits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from memo.mip.inputs.profile import LayerProfile

__all__ = ["least_spared_share", "most_spared", "most_spared_share", "taken_as", "undivided"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _TakenAs(LayerProfile):
    """A class of which codes are taken to spare one share, whatever its points."""

    share: float

    def spared_bytes(self, points: Mapping[str, float]) -> float:
        """Bytes by which what is saved is taken to be fewer."""
        return self.share * (self.fixed_bytes + sum(p.saved_bytes * points.get(p.name, 0.0) for p in self.points))


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
    return layer if layer.coding is None else taken_as(layer, most_spared_share(layer))


def taken_as(layer: LayerProfile, share: float) -> LayerProfile:
    """The class with this share at each of its points."""
    fields = {field.name: getattr(layer, field.name) for field in dataclasses.fields(LayerProfile)}
    return _TakenAs(**fields, share=share)
