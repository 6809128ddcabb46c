"""Kernels that call operators which autocast casts for: recording a layer changes none of their results."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_models import stack
from torch import nn
from torch.nn import functional as F

import memo

HIDDEN = 32
_LIBRARY = torch.library.Library("memo_autocast", "FRAGMENT")
_LIBRARY.define("projected(Tensor x, Tensor w) -> Tensor")
_LIBRARY.impl("projected", lambda x, w: F.linear(x, w).float(), "CPU")


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x, w = ctx.saved_tensors
    return grad @ w, grad.flatten(0, 1).t() @ x.flatten(0, 1)


torch.library.register_autograd(
    "memo_autocast::projected",
    _backward,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    lib=_LIBRARY,
)

KERNELS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "of a library": torch.ops.memo_autocast.projected,
    "bilinear": lambda x, w: F.bilinear(x, x, w.expand(4, *w.shape)).repeat_interleave(HIDDEN // 4, -1),
    "pinv": lambda x, w: x @ torch.linalg.pinv(w.detach() + 4 * torch.eye(HIDDEN)).float(),
    "sparse product": lambda x, w: x + torch.sparse.mm((torch.eye(48) * 0.3).to_sparse(), x[0].detach()).float(),
}


class Layer(nn.Module):
    def __init__(self, kernel: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.kernel = kernel
        self.weight = nn.Parameter(torch.randn(HIDDEN, HIDDEN) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.kernel(F.layer_norm(x, (HIDDEN,)) * 1.5, self.weight).tanh()


@pytest.mark.filterwarnings("ignore:.*moves whole tensors:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("alpha", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_sees_autocast_as_it_does_without_memo(kernel: str, alpha: float) -> None:
    def gradients(managed: bool) -> list[torch.Tensor]:
        model = stack(make=lambda: Layer(KERNELS[kernel]))
        manager = memo.offload(model, alpha=alpha, host="16MiB", min_bytes=1) if managed else None
        found = []
        for step in range(2):
            model.zero_grad()
            tokens = torch.arange(96).view(2, 48) * (step + 1) % 61
            with torch.autocast("cpu", torch.bfloat16):
                if manager is None:
                    loss = model(tokens)
                else:
                    with manager:
                        loss = model(tokens)
            loss.backward()
            found += [
                loss.detach(),
                *(parameter.grad for parameter in model.parameters() if parameter.grad is not None),
            ]
        if manager is not None:
            manager.close()
        return found

    for ours, theirs in zip(gradients(True), gradients(False), strict=True):
        assert torch.equal(ours, theirs)
