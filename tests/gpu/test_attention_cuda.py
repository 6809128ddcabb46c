"""Attention that only a GPU runs: FlexAttention compiled inside an eager layer, and torch's varlen attention."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.attention.varlen import varlen_attn

import memo
from memo.gpt.model.attention import attend

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        "emulated_cuda" in getattr(sys.modules.get("operators"), "__file__", ""),
        reason="the emulated device has no such kernels",
    ),
]
SEQ, HIDDEN, HEADS = 256, 128, 2


@pytest.fixture
def device() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    return torch.device("cuda")


def compiled_flex() -> Callable[..., torch.Tensor]:
    compiled = torch.compile(flex_attention, dynamic=False)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = compiled(*(part.transpose(1, 2) for part in (q, k, v)))
        return out.transpose(1, 2)

    return attend


def packed() -> Callable[..., torch.Tensor]:
    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        ends = torch.arange(0, q.shape[0] * SEQ + 1, SEQ, device=q.device, dtype=torch.int32)
        rows = [part.flatten(0, 1) for part in (q, k, v)]
        out: Any = varlen_attn(*rows, ends, ends, SEQ, SEQ)
        return out.view_as(q)  # type: ignore[no-any-return]

    return attend


class Layer(nn.Module):
    def __init__(self, attend: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.attend = attend
        self.qkv, self.up, self.down = (
            nn.Linear(HIDDEN, width * HIDDEN) if width else nn.Linear(4 * HIDDEN, HIDDEN) for width in (3, 4, 0)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.view(*x.shape[:2], HEADS, -1).contiguous() for part in self.qkv(x).chunk(3, -1))
        x = x + self.attend(q, k, v).reshape(x.shape)
        return x + self.down(torch.relu(self.up(x)))


def losses(kind: Callable[[], Callable[..., torch.Tensor]], alpha: float | None, device: torch.device) -> Any:
    torch.manual_seed(0)
    attend = kind()
    model = nn.Sequential(*(Layer(attend) for _ in range(3))).to(device, torch.bfloat16)
    manager = None if alpha is None else memo.offload(model, alpha=alpha, min_bytes=1, host="64MiB", layers=list(model))
    found: list[torch.Tensor] = []
    for step in range(3):
        x = torch.randn(2, SEQ, HIDDEN, generator=torch.Generator().manual_seed(step)).to(device, torch.bfloat16)
        x.requires_grad_()
        if manager is None:
            loss = model(x).float().square().mean()
        else:
            with manager:
                loss = model(x).float().square().mean()
        loss.backward()
        assert x.grad is not None
        found += [loss.detach(), x.grad]
        model.zero_grad()
    return found, None if manager is None else manager.report().recompute


@pytest.mark.parametrize("kind", [compiled_flex, packed])
def test_layers_are_divided_around_their_attention(
    kind: Callable[[], Callable[..., torch.Tensor]], device: torch.device
) -> None:
    want, _ = losses(kind, None, device)
    again, _ = losses(kind, None, device)
    if not all(torch.equal(a, b) for a, b in zip(want, again, strict=True)):
        pytest.skip("this attention's backward is not deterministic here")
    for alpha in (0.0, 0.25):
        got, use = losses(kind, alpha, device)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
        assert use.refused == {}
        assert use.accepted == 3
        assert use.recomputed_bytes > 0


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 0.05), (torch.float32, 1e-4)])
def test_local_attention_is_attention_with_a_mask(dtype: torch.dtype, bound: float, device: torch.device) -> None:
    """Roundings of bfloat16 and of float32 with reduced products, of results and gradients of order one."""
    torch.manual_seed(0)
    window, shape = 40, (2, SEQ, HEADS, 64)
    tensors = [torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3)]
    wide = [tensor.detach().double().requires_grad_() for tensor in tensors]
    ahead = torch.arange(SEQ, device=device)[:, None] - torch.arange(SEQ, device=device)
    scores = torch.einsum("bqnd,bknd->bnqk", *wide[:2]) / 8.0
    scores = scores.masked_fill((ahead < 0) | (ahead >= window), -torch.inf)
    plain = torch.einsum("bnqk,bknd->bqnd", scores.softmax(-1), wide[2])
    found, upstream = attend(*tensors, window=window), torch.randn(shape, device=device)
    results = (found, *torch.autograd.grad(found, tensors, upstream.to(dtype)))
    exact = (plain, *torch.autograd.grad(plain, wide, upstream.to(dtype).double()))
    for one, other in zip(results, exact, strict=True):
        assert (one - other).abs().max() <= bound * other.abs().max()
