"""Choices for single layers as a caller writes them, by position or name, turned into choices by the layer's name."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from memo.errors import UsageError
from memo.swap import Bans, Level, TokenLevels, setting_of

if TYPE_CHECKING:
    from memo.swap import Layer, Setting

__all__ = ["LayerLevels", "Names", "bans_by_layer", "layer_at", "settings_by_layer"]

LayerLevels = float | Sequence[float] | Level | TokenLevels
"""Levels of one layer, as a caller writes them."""

Names = Collection[str] | Mapping[int | str, Collection[str]]
"""Names of operators or groups: for all layers, or for each layer that is named."""


def layer_at(layers: Sequence[Layer], key: int | str, *, argument: str) -> Layer:
    """Returns the layer at a position, or of a name.

    Raises:
        UsageError: there is none.
    """
    names = [layer.name for layer in layers]
    if isinstance(key, int) and not 0 <= key < len(names):
        raise UsageError(f"{argument}: no layer {key}; there are {len(names)}")
    if isinstance(key, str) and key not in names:
        raise UsageError(f"{argument}: no layer {key!r}; they are {names[0]!r} to {names[-1]!r}")
    return layers[names.index(key) if isinstance(key, str) else key]


def settings_by_layer(layers: Sequence[Layer], levels: Mapping[int | str, LayerLevels]) -> dict[str, Setting]:
    """Returns the setting of each layer that is named.

    Raises:
        UsageError: an unknown layer, or an invalid level.
    """
    return {
        layer_at(layers, key, argument="levels").name: setting_of(value, argument=f"levels[{key!r}]")
        for key, value in levels.items()
    }


def bans_by_layer(layers: Sequence[Layer], keep: Names | None, repeat: Names | None) -> dict[str, Bans]:
    """Returns the bans of each layer that has any.

    Raises:
        UsageError: an unknown layer, operator or group; or one that is both kept and repeated in a layer.
    """
    kept, repeated = _by_layer(layers, keep, "keep"), _by_layer(layers, repeat, "repeat")
    named = [layer.name for layer in layers if layer.name in kept or layer.name in repeated]
    return {name: Bans(kept.get(name, frozenset()), repeated.get(name, frozenset())) for name in named}


def _by_layer(layers: Sequence[Layer], given: Names | None, argument: str) -> dict[str, frozenset[str]]:
    if given is None:
        return {}
    if isinstance(given, Mapping):
        return {
            layer_at(layers, key, argument=argument).name: _names(value, f"{argument}[{key!r}]")
            for key, value in given.items()
        }
    names = _names(given, argument)
    return {layer.name: names for layer in layers} if names else {}


def _names(given: Any, argument: str) -> frozenset[str]:
    if isinstance(given, str) or not isinstance(given, Collection) or not all(isinstance(name, str) for name in given):
        raise UsageError(f"{argument}: {given!r} is no list of names such as ['aten.mm', 'attention']")
    return frozenset(given)
