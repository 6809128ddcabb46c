"""Tensor-parallel group of a model that `memo.parallelize` divided: its ranks must treat each layer in the same way."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    import torch.distributed as dist

_GROUPS: weakref.WeakKeyDictionary[nn.Module, dist.ProcessGroup] = weakref.WeakKeyDictionary()


def note_group(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Records that the layers of `model` are divided over `group`."""
    _GROUPS[model] = group


def group_of(model: nn.Module) -> dist.ProcessGroup | None:
    """Group recorded for the model, or for the first of its modules that has one; None for others."""
    return next((_GROUPS[module] for module in model.modules() if module in _GROUPS), None) if _GROUPS else None
