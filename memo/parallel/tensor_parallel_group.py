"""Which ranks must treat a model's layers alike: those that talk within them. Known of models that memo divided itself."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["group_of", "note_group"]

_GROUPS: weakref.WeakKeyDictionary[nn.Module, dist.ProcessGroup] = weakref.WeakKeyDictionary()


def note_group(model: nn.Module, group: dist.ProcessGroup) -> None:
    """The layers of `model` are divided over `group`."""
    _GROUPS[model] = group


def group_of(model: nn.Module) -> dist.ProcessGroup | None:
    """Of the model, or of the first part of it that has one; None where nothing is known."""
    return next((_GROUPS[module] for module in model.modules() if module in _GROUPS), None) if _GROUPS else None
