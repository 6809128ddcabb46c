"""Layer classes of a profile, from measurements of single layers.

Used for the steps that a manager measures before it plans (memo.autoplan.profile_from_step) and for `memo.profile`
(memo.profiling.measure). Layers of one name that save the same bytes at each point are one class and share their median
times, so that noise does not make equal layers differ.
"""

from __future__ import annotations

import dataclasses
import statistics
from typing import TYPE_CHECKING

from memo.mip.inputs import ATTENTION, LayerProfile, PointProfile

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import nn

    from memo.swap import LayerCosts

_TIMES = ("forward_s", "backward_s", "attention_s")
_PEAKS = ("forward_transient_bytes", "backward_transient_bytes", "storages", "largest_storage_bytes")


def mlp_tiles_of(modules: Iterable[nn.Module]) -> int:
    """Returns the number of tiles of the layers' MLP: `mlp.tiles` in memo's own GPT, 1 in other models."""
    found = (getattr(getattr(module, "mlp", None), "tiles", 1) for module in modules)
    return max((tiles for tiles in found if isinstance(tiles, int)), default=1)


def points_of(costs: LayerCosts, *, again_flops: float | None = None) -> tuple[PointProfile, ...]:
    """Converts a layer's curve to points, without those that save no less than the one before.

    A point of a curve says all that is saved, so that nothing is saved at every point.

    Args:
        costs: of a layer.
        again_flops: of products that a recompute at point `attention` repeats, where they were counted.
    """
    found: list[PointProfile] = []
    for point in costs.points:
        again = again_flops if point.name == ATTENTION and again_flops is not None else point.recompute_flops
        if found and point.saved_bytes >= found[-1].saved_bytes:
            continue
        beside = min(point.beside_bytes, point.saved_bytes) if found else 0
        known = {**dataclasses.asdict(point), "beside_bytes": beside, "recompute_flops": again}
        found.append(PointProfile(**known))
    return tuple(found)


def classes_of(layers: Sequence[LayerProfile]) -> tuple[tuple[LayerProfile, ...], tuple[str, ...]]:
    """Groups equal layers; returns the classes and each layer's class name. A second class of one name is `name#2`."""
    groups: dict[tuple[object, ...], list[LayerProfile]] = {}
    for layer in layers:
        groups.setdefault(_class_key(layer), []).append(layer)
    shared: dict[tuple[object, ...], LayerProfile] = {}
    for key, alike in groups.items():
        same_name = sum(other[0] == key[0] for other in shared)
        name = alike[0].name if not same_name else f"{alike[0].name}#{same_name + 1}"
        shared[key] = _merged(name, alike)
    return tuple(shared.values()), tuple(shared[_class_key(layer)].name for layer in layers)


def _class_key(layer: LayerProfile) -> tuple[object, ...]:
    points = ((p.name, p.saved_bytes, p.beside_bytes, p.held_bytes, p.absent_bytes) for p in layer.points)
    # Local and full attention save the same bytes and take different times; FLOPs are known of a measured profile alone.
    return layer.name, layer.always_bytes, layer.other_bytes, layer.attention_flops, *points


def _merged(name: str, alike: Sequence[LayerProfile]) -> LayerProfile:
    """Medians of the times, maxima of transients and storages."""
    points = tuple(
        dataclasses.replace(known, recompute_s=statistics.median(layer.points[number].recompute_s for layer in alike))
        for number, known in enumerate(alike[0].points)
    )
    times = {field: statistics.median(getattr(layer, field) for layer in alike) for field in _TIMES}
    peaks = {field: max(getattr(layer, field) for layer in alike) for field in _PEAKS}
    return dataclasses.replace(alike[0], name=name, points=points, **times, **peaks)
