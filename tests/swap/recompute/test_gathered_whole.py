"""Layers whose parameters ZeRO-3 gathers all at once are divided as if the parameters were always there."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from gathered_parameters import Linear
from torch import nn

import memo


class Layer(nn.Module):
    def __init__(self, hidden: int = 32) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.qkv, self.out = Linear(hidden, 3 * hidden), Linear(hidden, hidden)
        self.up, self.down = Linear(hidden, 4 * hidden), Linear(4 * hidden, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, hidden = x.shape
        q, k, v = (t.view(batch, seq, 2, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, seq, hidden))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GatheredWhole:
    """Gathers a leaf's parameters around its forward and before its backward, each time into new memory."""

    def __init__(self, layer: nn.Module) -> None:
        layer._z3_leaf = True  # type: ignore[assignment]
        self.memory: list[weakref.ref[torch.UntypedStorage]] = []
        self._shards = {parameter: parameter.data.clone() for parameter in layer.parameters()}
        layer.register_forward_pre_hook(lambda *_: self.gather())
        layer.register_forward_hook(self._after)
        self.release()

    def gather(self) -> None:
        for parameter, shard in self._shards.items():
            parameter.data = shard.clone()
            self.memory.append(weakref.ref(parameter.untyped_storage()))

    def release(self) -> None:
        for parameter in self._shards:
            parameter.data = torch.empty(0)

    @property
    def alive(self) -> int:
        return sum(storage.nbytes() for weak in self.memory if (storage := weak()) is not None)

    def _after(self, module: nn.Module, args: Any, out: torch.Tensor) -> None:
        self.release()
        assert out.grad_fn is not None
        out.grad_fn.register_prehook(lambda _: self.gather())  # before any of its backward


def steps(alpha: float | None, *, gathered: bool) -> tuple[list[torch.Tensor], int, int]:
    """Gradients of two steps, bytes that moved, and gathered bytes alive between forward and backward."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer() for _ in range(3)))
    leaves = [GatheredWhole(layer) for layer in model] if gathered else []
    manager = (
        None if alpha is None else memo.offload(model, alpha=alpha, host="8MiB", min_bytes=256, layers=list(model))
    )
    found, alive = [], 0
    for step in range(2):
        x = torch.randn(2, 48, 32, generator=torch.Generator().manual_seed(step)).requires_grad_()
        if manager is None:
            loss = model(x).square().mean()
        else:
            with manager:
                loss = model(x).square().mean()
        alive += sum(leaf.alive for leaf in leaves)
        loss.backward()
        for leaf in leaves:
            leaf.release()
        assert x.grad is not None
        found += [x.grad, *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]
        for parameter in model.parameters():
            parameter.grad = None
    if manager is None:
        return found, 0, alive
    use = manager.report().recompute
    assert use is None or use.refused == {}, use
    manager.close()
    return found, manager.stats.bytes_host, alive


@pytest.mark.parametrize("alpha", [1.0, 0.5, 0.0])
def test_a_leaf_moves_what_a_layer_with_its_parameters_at_hand_moves(alpha: float) -> None:
    want, _, _ = steps(None, gathered=False)
    _, moved_at_hand, _ = steps(alpha, gathered=False)
    got, moved, alive = steps(alpha, gathered=True)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert moved == moved_at_hand > 0
    assert alive == 0
