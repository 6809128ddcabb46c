"""Settings of the engine's tests, and what they share: a manager of a small model that must leave nothing behind."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import pytest
import torch
from quick_collections import quick_collections as quick_collections

import memo

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch import nn


@pytest.fixture
def offload(tmp_path: Path) -> Iterator[Callable[..., memo.Manager]]:
    """memo.offload to a disk; afterwards nothing may be left anywhere."""
    made: list[memo.Manager] = []

    def make(model: nn.Module, **options: Any) -> memo.Manager:
        made.append(memo.offload(model, **{"disk": tmp_path, "min_bytes": 512, "alpha": 1.0, **options}))
        return made[-1]

    yield make
    # After an exception in backward, autograd's own queue holds the nodes it had not reached until the next backward.
    torch.ones(1, requires_grad=True).sum().backward()
    for _ in range(2):  # what an exception's frames held in a cycle has a finalizer, and goes with the second
        gc.collect()
    for manager in made:
        assert manager.stats.live_entries == 0
        manager.close()  # copies that were still running when their tensors died are over now
        assert manager.stats.device_bytes == 0
        assert all(tier.used == 0 for tier in manager._engine.tiers)
    assert list(tmp_path.iterdir()) == []
