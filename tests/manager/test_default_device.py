"""A default device of the program's (`torch.set_default_device`) is none of memo's own tensors' business."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import memo


class Block(nn.Module):
    """Norm, attention and a network, with residual connections."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(32)
        self.mixed = nn.Linear(32, 96)
        self.up, self.down = nn.Linear(32, 128), nn.Linear(128, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = (
            part.unflatten(-1, (4, 8)).transpose(1, 2) for part in self.mixed(self.norm(x)).chunk(3, -1)
        )
        mixed = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + mixed.transpose(1, 2).flatten(-2)
        return x + nn.functional.dropout(self.down(nn.functional.gelu(self.up(x))), 0.1)


def _gradients(default: str, steps: int = 3, **offload: Any) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Block() for _ in range(3)))
    inputs = [torch.randn(2, 64, 32) for _ in range(steps)]
    found: list[torch.Tensor] = []
    with torch.device(default):
        manager = memo.offload(model, layers=[*model], min_bytes=1, **offload) if offload else None
        if manager is not None:
            manager.attach()
        for x in inputs:
            torch.manual_seed(1)
            model(x).square().mean().backward()
            found += [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            model.zero_grad()
        if manager is not None:
            manager.close()
    return found


@pytest.mark.parametrize(
    "offload",
    [
        {"alpha": 1.0},
        {"alpha": 0.5},
        {"alpha": 0.0},
        {"alpha": 1.0, "codec": "int8"},
        {"alpha": 0.5, "disk": True, "host": 0},
        {"alpha": 0.5, "disk": True, "host": 0, "verify": True},
        {"device": "4GiB"},
    ],
    ids=str,
)
def test_gradients_are_the_same_bits_under_another_default_device(offload: dict[str, Any], tmp_path: Path) -> None:
    where = {"disk": tmp_path, "disk_budget": "64MiB"} if offload.get("disk") else {"host": "64MiB"}
    offload = {**offload, **where, "host": offload.get("host", "64MiB")}
    got = _gradients("meta", **offload)  # what memo makes there has no bytes
    want = _gradients("cpu", **(offload if "codec" in offload else {}))
    assert len(got) == len(want) > 0
    assert all(map(torch.equal, got, want))
