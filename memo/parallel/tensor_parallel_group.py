"""Group of ranks among which `memo.parallelize` divided a layer: they must treat it in the same way."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    import torch.distributed as dist

_GROUPS: weakref.WeakKeyDictionary[nn.Module, dist.ProcessGroup] = weakref.WeakKeyDictionary()


def note_group(layer: nn.Module, group: dist.ProcessGroup) -> None:
    """Records that a layer is divided over `group`."""
    _GROUPS[layer] = group


def group_of(model: nn.Module) -> dist.ProcessGroup | None:
    """Group recorded for the first of the model's modules that has one; None for others."""
    return next((_GROUPS[module] for module in model.modules() if module in _GROUPS), None) if _GROUPS else None
