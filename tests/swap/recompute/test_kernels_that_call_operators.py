"""Kernels that call operators: they see autocast, conjugation and autograd as they do without memo, and are bit-equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from small_models import SEQ, Step, assert_equal, ids, stack, train
from torch import nn
from torch.nn import functional as F

import memo

HIDDEN = 32
_LIBRARY = torch.library.Library("memo_kernels", "FRAGMENT")


def _correlated(x: torch.Tensor) -> torch.Tensor:
    spectrum = torch.fft.rfft(x.float())
    return torch.fft.irfft(spectrum * spectrum.conj(), n=x.shape[-1])


def _add(x: torch.Tensor, y: torch.Tensor) -> None:
    x.add_(y)


for _schema, _kernel in {
    "projected(Tensor x, Tensor w) -> Tensor": lambda x, w: F.linear(x, w).float(),
    "product(Tensor x, Tensor w) -> Tensor": lambda x, w: F.linear(x, w).float().sin(),
    "wave(Tensor x) -> Tensor": lambda x: x * x.sin(),
    "correlated(Tensor x) -> Tensor": _correlated,
    "add(Tensor(a!) x, Tensor y) -> ()": _add,
}.items():
    _LIBRARY.define(_schema)
    _LIBRARY.impl(_schema.partition("(")[0], _kernel, "CPU")


def _backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x, w = ctx.saved_tensors
    return grad @ w, grad.flatten(0, 1).t() @ x.flatten(0, 1)


torch.library.register_autograd(
    "memo_kernels::projected",
    _backward,
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    lib=_LIBRARY,
)


def _in_place(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x @ w
    _OPS.add(y, x)
    return y.float()


def _complex(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.complex((x.float() @ w).float(), x.float())


def _attention(x: torch.Tensor) -> torch.Tensor:
    """Its kernel calls products, which autocast casts, and must not there: it casts what attention is given."""
    behind = torch.fft.irfft(torch.fft.rfft(x.float()), n=HIDDEN)
    return F.scaled_dot_product_attention(x, x, behind, is_causal=True)


def _sparse_product(x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", enabled=False):  # which has no kernel for it
        return torch.stack([(torch.eye(SEQ) * 0.3).to_sparse_csr() @ each.float() for each in x])


_OPS: Any = torch.ops.memo_kernels
KERNELS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "of a library": _OPS.projected,
    "that autograd sees into": _OPS.product,
    "of one argument that autograd sees into": lambda x, w: _OPS.wave(x @ w),
    "that conjugates": lambda x, w: x @ w + _OPS.correlated((x @ w).detach()),
    "that changes its argument": _in_place,
    "pinv of complex numbers": lambda x, w: x + torch.linalg.pinv(_complex(x, w)[:, :4]).abs().mean(),
    "conjugated factor": lambda x, w: (_complex(x, w) @ _complex(x, w).mH).abs() @ x.float(),
    "covariance of complex numbers": lambda x, w: x + torch.cov(_complex(x, w)[0]).abs().mean(),
    "attention behind complex numbers": lambda x, w: _attention(x @ w),
    "sparse CSR product": lambda x, w: _sparse_product(x @ w),
    "bilinear": lambda x, w: F.bilinear(x, x, w.expand(4, *w.shape)).repeat_interleave(HIDDEN // 4, -1),
    "pinv": lambda x, w: x @ torch.linalg.pinv(w.detach() + 4 * torch.eye(HIDDEN)).float(),
    "sparse product": lambda x, w: x + torch.sparse.mm((torch.eye(SEQ) * 0.3).to_sparse(), x[0].detach()).float(),
}


class Layer(nn.Module):
    def __init__(self, kernel: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.kernel = kernel
        self.weight = nn.Parameter(torch.randn(HIDDEN, HIDDEN) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.kernel(F.layer_norm(x, (HIDDEN,)) * 1.5, self.weight).tanh()


@pytest.mark.covering(2)
@pytest.mark.filterwarnings("ignore:.*moves whole tensors:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.filterwarnings("ignore:.*an autograd kernel was not registered")
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("alpha", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_kernel_computes_what_it_does_without_memo(kernel: str, alpha: float, autocast: bool) -> None:
    def steps(managed: bool) -> list[Step]:
        model = stack(make=lambda: Layer(KERNELS[kernel]))
        manager = memo.offload(model, alpha=alpha, host="16MiB", min_bytes=1) if managed else None

        def forward(step: int) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss: torch.Tensor = model(ids(step))
            return loss

        return train(model, forward, manager, steps=2)

    assert_equal(steps(True), steps(False))
