"""Arguments of `memo.offload`: checks of their types, and choices for single layers by the layer's name.

Owns the refusal of arguments of the wrong kind, in one line that says what is wanted, and of unknown layers. Amounts and
files are parsed, and refused, where they are used. Invariant: nothing has been opened when these functions raise.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import itertools
import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from memo.errors import UsageError
from memo.mip.activation import ActivationPlan
from memo.swap import Bans, Level, setting_of

if TYPE_CHECKING:
    from memo.swap import Layer, Setting

LayerLevels = float | Sequence[float] | Level
"""Levels of one layer, as a caller writes them."""

Names = Collection[str] | Mapping[int | str, Collection[str]]
"""Names of operators or groups: for all layers, or for each layer that is named."""

_PATH = (str, os.PathLike)
_P = ParamSpec("_P")
_T = TypeVar("_T")


_MEANT = {
    "gpu": "device",
    "memory": "device",
    "ram": "host",
    "cpu": "host",
    "nvme": "disk",
    "offload": "disk",
    "ssd": "disk",
}
"""Beginnings of arguments as others name them."""


def naming_arguments(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Decorates a public function: the TypeError of an unknown keyword argument names the nearest one."""
    known = inspect.signature(function).parameters

    @functools.wraps(function)
    def called(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        for name in kwargs:
            if name not in known:
                first = name.partition("_")[0]  # of host_memory or device_budget
                meant = _MEANT.get(first, first)
                near = [meant] if meant in known else difflib.get_close_matches(name, known, n=1)
                instead = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known)}"
                raise TypeError(f"memo.{function.__name__} has no argument {name!r}; {instead}")
        return function(*args, **kwargs)

    return called


def require_kinds(
    model: object,
    *,
    plan: object,
    levels: object,
    layers: object,
    host_pool: object,
    disk: object,
    trace: object,
    group: object,
    schedule: object,
) -> None:
    """Raises UsageError for the first argument whose type `memo.offload` does not take; None is accepted."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"model: {_shown(model)} is no torch.nn.Module")
    _require("plan", plan, (ActivationPlan, *_PATH), "an activation plan or the name of its file")
    _require("levels", levels, (Mapping,), "a dict from layers to levels, such as {0: 0.5}")
    if isinstance(layers, str):
        raise UsageError(f"layers: {_shown(layers)} is a name; give the modules: model.get_submodule({_shown(layers)})")
    _require("layers", layers, (Iterable, type), "a ModuleList, a list of modules, or a class")
    _require("host_pool", host_pool, _PATH, "the name of a file")
    _require("trace", trace, _PATH, "the name of a file or a directory")
    if isinstance(disk, Iterable) and not isinstance(disk, str):
        for directory in disk:
            _require("disk", directory, _PATH, "the name of a directory")
    else:
        _require("disk", disk, _PATH, "the name of a directory, or a list of them")
    _require_method("group", group, "size", "a torch.distributed process group")
    _require_method("schedule", schedule, "step", "one of torch.distributed.pipelining's schedules")


def require_choice(name: str, value: object, choices: Sequence[object]) -> None:
    """Raises UsageError for a value that is none of the choices."""
    if value not in choices:
        raise UsageError(f"{name}: {_shown(value)} is none of {', '.join(map(repr, choices))}")


def require_device_budget(device: object) -> None:
    """Raises UsageError for a device's name in the place of a budget."""
    name = device.type if isinstance(device, torch.device) else device
    if isinstance(name, str) and re.fullmatch(r"(cuda|cpu|gpu)(:\d+)?", name.strip().lower()):
        raise UsageError(
            f"device: {name!r} is no budget of memory, such as device='70GiB'; memo manages the GPU that the model is on"
        )


def require_manageable(model: nn.Module) -> nn.Module:
    """Returns the model.

    Raises:
        UsageError: it is a wrapper whose forward does not run the layers that are given, or has lazy parameters.
    """
    if isinstance(model, nn.DataParallel) and len(model.device_ids) > 1:
        raise UsageError(
            "model: DataParallel runs copies of the model in threads; give the model inside, model.module, and use "
            "DistributedDataParallel, one process for each GPU"
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise UsageError("model: a TorchScript module runs no Python; give the model that it was made from")
    for name, tensor in itertools.chain(model.named_parameters(), model.named_buffers()):
        if is_lazy(tensor):
            raise UsageError(f"model: {name} has no shape before the first forward; run one without memo")
    return model


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


def _require(name: str, value: object, kinds: tuple[type, ...], wanted: str) -> None:
    if value is not None and not isinstance(value, kinds):
        raise UsageError(f"{name}: {_shown(value)} is not {wanted}")
    if value == "":  # an unset shell variable; as a path it would mean the working directory
        raise UsageError(f"{name}: an empty text is not {wanted}")


def _require_method(name: str, value: Any, method: str, wanted: str) -> None:
    if value is not None and not callable(getattr(value, method, None)):
        raise UsageError(f"{name}: {_shown(value)} is not {wanted}")


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 and text.isprintable() else f"a {type(value).__name__}"


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
