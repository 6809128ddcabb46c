"""Layers on a GPU that keep, read and compute tensors on the host, as attention in float32 does with its seed."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import memo

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")]

BATCH, TOKENS, HIDDEN = 2, 32, 64
STEPS = 4


@pytest.fixture(autouse=True)
def _repeatable() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


class Layer(nn.Module):
    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x).sin()
        return x + self.second((self.between(h) * h).cos())


def attention(h: torch.Tensor) -> torch.Tensor:
    heads = h.view(BATCH, TOKENS, 4, HIDDEN // 4).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).reshape(h.shape)


def a_number(h: torch.Tensor) -> torch.Tensor:
    mean = h.detach().abs().mean().cpu()
    return h * (mean * 2).sqrt() * torch.tensor(0.5).exp()


def there_and_back(h: torch.Tensor) -> torch.Tensor:
    there = (h.cpu() * 2).cos()
    return (there * there.sin()).to(h.device)


def products(h: torch.Tensor) -> torch.Tensor:
    """Of 16 times the bytes of what they are made from, so that they are computed again."""
    weight = torch.eye(HIDDEN, device="cpu") + 0.1
    wide = (h.detach().cpu() @ weight).float().unsqueeze(-1) * torch.arange(16.0, device="cpu")
    return (wide.to(h.device).cos() * h.unsqueeze(-1)).sum(-1)


def dropped(h: torch.Tensor) -> torch.Tensor:
    return (F.dropout(h.cpu(), 0.3) * 1.5).sin().to(h.device)


def filled(h: torch.Tensor) -> torch.Tensor:
    there = h.detach().cpu()
    memory = torch.empty_like(there)
    memory.copy_(there).sin_()
    ones = torch.zeros_like(there)
    ones[:, ::2] = 1.5
    drawn = torch.empty(h.shape, device="cpu").bernoulli_(0.7)
    return (memory * ones * (drawn * 2).exp()).to(h.device).cos()


def indices(h: torch.Tensor) -> torch.Tensor:
    return h[:, h.detach().mean((0, 2)).cpu().argsort()].cos()


def shapes_alone(h: torch.Tensor) -> torch.Tensor:
    shape = (torch.empty(h.shape, device="meta") + 1).sum(-1, keepdim=True).shape
    return h.cos() * shape[0]


def waited_for(h: torch.Tensor) -> torch.Tensor:
    """What waits for the copy is no operator, so a replay does not have it."""
    there = h.detach().to("cpu", non_blocking=True)
    torch.cuda.current_stream().synchronize()
    return (there * 2).cos().to(h.device)


def trained(
    between: Callable[[torch.Tensor], torch.Tensor], *, autocast: bool, alpha: float | None
) -> list[torch.Tensor]:
    """Losses and gradients of some steps, whose backwards run behind a busy device but in the first step."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Layer(between) for _ in range(3))).cuda()
    manager = None if alpha is None else memo.offload(model, layers=[*model], alpha=alpha, host="64MiB", min_bytes=1)
    found = []
    for step in range(STEPS):
        torch.manual_seed(step)
        x = torch.randn(BATCH, TOKENS, HIDDEN).cuda().requires_grad_()
        with manager or contextlib.nullcontext():
            loss = model(x).square().sum()
        if step:
            torch.cuda._sleep(20_000_000)
        with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
            loss.backward()
        found += [loss.detach(), x.grad, *(parameter.grad for parameter in model.parameters())]
        model.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    if manager is not None:
        assert alpha == 1 or manager.stats.bytes_recomputed > 0
        manager.close()
    return found


@pytest.mark.parametrize("autocast", [False, True], ids=["", "backward under autocast"])
@pytest.mark.parametrize(
    "between", [attention, a_number, there_and_back, products, dropped, filled, indices, shapes_alone, waited_for]
)
def test_gradients_are_equal_bit_for_bit(between: Callable[[torch.Tensor], torch.Tensor], autocast: bool) -> None:
    want = trained(between, autocast=autocast, alpha=None)
    for alpha in (1.0, 0.5, 0.0):
        got = trained(between, autocast=autocast, alpha=alpha)
        assert [
            at for at, (ours, theirs) in enumerate(zip(got, want, strict=True)) if not torch.equal(ours, theirs)
        ] == []


def test_a_program_that_ends_right_behind_its_backward_ends_well() -> None:
    """A thread of autograd's frees what memo asked it to call, and waits for the interpreter's lock to do so."""
    program = """
import sys, torch, memo
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3))).cuda()
manager = memo.offload(model, layers=[*model], host="64MiB", min_bytes=1)
with manager:
    loss = model(torch.randn(8, 64, device="cuda")).sum()
sys.setswitchinterval(10)  # no thread gets the lock that is not given it
loss.backward()
"""
    ended = [
        subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False) for _ in range(3)
    ]
    assert [(done.returncode, done.stderr) for done in ended] == [(0, "")] * 3
