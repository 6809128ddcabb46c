"""Layer classes of a profile, from measurements of single layers.

Used for the steps that a manager measures before it plans (memo.autoplan.profile_from_step) and for `memo.profile`
(memo.profiling.measure). Layers of one name that save the same bytes at each level are one class and share their median
times, so that noise does not make equal layers differ.
"""

from __future__ import annotations

import dataclasses
import statistics
from typing import TYPE_CHECKING

from memo.mip.inputs import LayerProfile, Level, LevelProfile
from memo.swap import Level as SwapLevel

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import nn

    from memo.swap import LayerCosts

__all__ = ["classes_of", "levels_of", "mlp_tiles_of"]

_LEVELS = {level: SwapLevel[level.name] for level in Level}
_TIMES = ("forward_s", "backward_s", "attention_s")
_PEAKS = ("forward_transient_bytes", "backward_transient_bytes", "storages", "largest_storage_bytes")


def mlp_tiles_of(modules: Iterable[nn.Module]) -> int:
    """Returns the number of tiles of the layers' MLP: `mlp.tiles` in memo's own GPT, 1 in other models."""
    found = (getattr(getattr(module, "mlp", None), "tiles", 1) for module in modules)
    return max((tiles for tiles in found if isinstance(tiles, int)), default=1)


def levels_of(costs: LayerCosts) -> tuple[LevelProfile, ...]:
    """Converts costs to level profiles; a level that never ran, or saves nothing more, is left out."""
    found: list[LevelProfile] = []
    for level, name in _LEVELS.items():
        if name not in costs.bytes_per_token:
            continue
        nbytes = round(costs.bytes_per_token[name] * costs.tokens)
        if level is not Level.SAVE_ALL and nbytes >= found[-1].saved_bytes:
            continue
        per_token = 0.0 if level is Level.SAVE_ALL else costs.recompute_s_per_token.get(name)
        if per_token is not None:
            beside = round(costs.beside_per_token.get(name, 0.0) * costs.tokens)
            found.append(
                LevelProfile(
                    level=level,
                    saved_bytes=nbytes,
                    beside_bytes=min(beside, nbytes),
                    recompute_s=per_token * costs.tokens,
                )
            )
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
    levels = ((known.level, known.saved_bytes, known.beside_bytes) for known in layer.levels)
    return layer.name, layer.always_bytes, layer.other_bytes, *levels


def _merged(name: str, alike: Sequence[LayerProfile]) -> LayerProfile:
    """Medians of the times, maxima of transients and storages."""
    levels = tuple(
        dataclasses.replace(known, recompute_s=statistics.median(layer.levels[number].recompute_s for layer in alike))
        for number, known in enumerate(alike[0].levels)
    )
    times = {field: statistics.median(getattr(layer, field) for layer in alike) for field in _TIMES}
    peaks = {field: max(getattr(layer, field) for layer in alike) for field in _PEAKS}
    return dataclasses.replace(alike[0], name=name, levels=levels, **times, **peaks)
