"""Shares of a plan: what becomes of the bytes that a model's layers save, over all layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from memo.mip.inputs import ALL

if TYPE_CHECKING:
    from memo.mip.activation import ActivationPlan, LayerPlan


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Mean shares over a plan's layers, weighted by the bytes that each layer saves at most."""

    alpha: float
    """Share at point `all`, the paper's alpha."""
    points: Mapping[str, float]
    """Share at each of the other points that is used."""
    kept: float
    """Share of the saved bytes that stays on the device. The rest of kept, host and disk to 1 is recomputed."""
    host: float
    disk: float

    @classmethod
    def of(cls, plan: ActivationPlan) -> Shares:
        """Shares of a plan."""
        layers = list(zip(plan.problem.profile.layer_profiles(), plan.layers, strict=True))
        whole = float(sum(layer.full_bytes for layer, _ in layers)) or 1.0
        by_point = float(sum(layer.points[0].saved_bytes for layer, _ in layers)) or 1.0

        def at(point: str) -> float:
            return sum(layer.points[0].saved_bytes * (own.point == point) for layer, own in layers) / by_point

        def of_bytes(share: Callable[[LayerPlan], float]) -> float:
            return sum(own.saved_bytes(layer) * share(own) for layer, own in layers) / whole

        return cls(
            alpha=at(ALL),
            points={own.point: at(own.point) for _, own in layers if own.recomputes},
            kept=of_bytes(lambda own: own.kept),
            host=of_bytes(lambda own: own.host),
            disk=of_bytes(lambda own: own.disk),
        )
