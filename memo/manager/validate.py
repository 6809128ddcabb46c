"""Type checks of the arguments of `memo.offload`.

Owns the refusal of arguments of the wrong kind, in one line that says what is wanted. Amounts, layer names and files
are parsed, and refused, where they are used. Invariant: nothing has been opened when these functions raise.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from memo.errors import UsageError
from memo.mip.activation import ActivationPlan

__all__ = ["require_choice", "require_kinds", "require_manageable"]

_PATH = (str, os.PathLike)


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


def require_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """Raises UsageError for a value that is none of the choices."""
    if value not in choices:
        raise UsageError(f"{name}: {_shown(value)} is none of {', '.join(map(repr, choices))}")


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
