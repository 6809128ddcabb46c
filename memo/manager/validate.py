"""What `memo.offload` was given, each argument of a kind that can mean something.

Owns the refusal of wrong kinds, in one line that says what is wanted; amounts, names and files are understood, and refused,
where they are used. Invariant: nothing has been opened yet when this refuses.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from memo.errors import UsageError
from memo.mip.activation import ActivationPlan

__all__ = ["require_kinds"]

_PATH = (str, os.PathLike)


def require_kinds(
    model: object,
    *,
    plan: object,
    levels: object,
    layers: object,
    disk: object,
    trace: object,
    group: object,
    schedule: object,
) -> None:
    """Raises UsageError for the first argument that is of no kind that `memo.offload` takes; None is left out."""
    if not isinstance(model, nn.Module):
        raise UsageError(f"model: {_told(model)} is no torch.nn.Module")
    _require("plan", plan, (ActivationPlan, *_PATH), "an activation plan or the name of its file")
    _require("levels", levels, (Mapping,), "a dict from layers to levels, such as {0: 0.5}")
    _require("layers", layers, (Iterable, type), "a ModuleList, a list of modules, or a class")
    _require("trace", trace, _PATH, "the name of a file or a directory")
    if isinstance(disk, Iterable) and not isinstance(disk, str):
        for directory in disk:
            _require("disk", directory, _PATH, "the name of a directory")
    else:
        _require("disk", disk, _PATH, "the name of a directory, or a list of them")
    _require_with("group", group, "size", "a torch.distributed process group")
    _require_with("schedule", schedule, "step", "one of torch.distributed.pipelining's schedules")


def _require(name: str, value: object, kinds: tuple[type, ...], words: str) -> None:
    if value is not None and not isinstance(value, kinds):
        raise UsageError(f"{name}: {_told(value)} is not {words}")
    if value == "":  # a shell's empty variable, which a path would take for the working directory
        raise UsageError(f"{name}: an empty text is not {words}")


def _require_with(name: str, value: Any, method: str, words: str) -> None:
    if value is not None and not callable(getattr(value, method, None)):
        raise UsageError(f"{name}: {_told(value)} is not {words}")


def _told(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 and text.isprintable() else f"a {type(value).__name__}"
