"""Replays of copies."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import memo


class NonBlocking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.linear(x).sin()
        copied = torch.empty_like(h).copy_(h, True).cos()
        return x + (h.to(torch.float64, non_blocking=True).cos().float() * copied).sin()


class BlockingSeen(TorchDispatchMode):
    """Notes `non_blocking` of each copy."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[bool] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._to_copy.default:
            self.seen.append(kwargs.get("non_blocking", False))
        elif func is torch.ops.aten.copy_.default and len(args) > 2:
            self.seen.append(args[2])
        return func(*args, **kwargs or {})


def test_a_replay_waits_for_copies_that_the_program_waited_for_in_its_own_way() -> None:
    """An event or a stream that the host waited for is no operator; a copy to the host would be read before it is there."""
    model = nn.Sequential(*(NonBlocking() for _ in range(3)))
    manager = memo.offload(model, layers=[*model], alpha=0.0, host="1MiB", min_bytes=1)
    for _ in range(2):
        mode = BlockingSeen()
        with mode, manager:
            loss = model(torch.randn(4, 16)).sum()
        forward, mode.seen = mode.seen, []
        with mode:
            loss.backward()
    manager.close()
    assert forward.count(True) == 6
    assert mode.seen
    assert not any(mode.seen)
