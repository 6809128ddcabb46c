"""Layers with compiled parts: what Inductor made is kept, what lies around it is divided, and gradients are equal."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
import torch
from small_models import Block, gradients
from torch import nn

import memo

if TYPE_CHECKING:
    from collections.abc import Callable


class Mixed(Block):
    """A block whose MLP is compiled as one function."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__(hidden, heads)
        self.mlp: Any = nn.Sequential(self.up, nn.GELU(), self.down)
        self.mlp = torch.compile(self.mlp, dynamic=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, seq, hidden = x.shape
        q, k, v = (t.view(batch, seq, self.heads, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, seq, hidden))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


def steps(how: str, alpha: float | None) -> tuple[list[torch.Tensor], Any]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = nn.Sequential(*((Mixed if how == "part" else Block)(32, 2) for _ in range(3)))
    if how == "whole":
        for layer in model:
            layer.compile(dynamic=False)
    manager = (
        None if alpha is None else memo.offload(model, alpha=alpha, host="8MiB", min_bytes=256, layers=list(model))
    )
    found: list[torch.Tensor] = []
    for step in range(2):
        x = torch.randn(2, 48, 32, generator=torch.Generator().manual_seed(step)).requires_grad_()
        if manager is None:
            loss = model(x).square().mean()
        else:
            with manager:
                loss = model(x).square().mean()
        loss.backward()
        assert x.grad is not None
        found += [x.grad, *(parameter.grad for parameter in model.parameters() if parameter.grad is not None)]
        for parameter in model.parameters():
            parameter.grad = None
    if manager is not None:
        manager.close()
    return found, None if manager is None else (manager.stats, manager.report())


@pytest.mark.timeout(400)
@pytest.mark.parametrize("how", ["part", "whole"])
def test_compiled_parts_are_kept_and_the_rest_is_divided(how: str) -> None:
    want, _ = steps(how, None)
    got, (stats, report) = steps(how, 0.0)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    assert report.recompute.refused == {}
    assert ("nothing to recompute: all that the layers save is made by compiled" in str(report)) == (how == "whole")
    if how == "part":
        assert stats.bytes_recomputed > 0


_LIBRARY = torch.library.Library("memo_compiled", "FRAGMENT")
_LIBRARY.define("smooth(Tensor x) -> Tensor")
_LIBRARY.impl("smooth", torch.atan, "CPU")
torch.library.register_autograd(
    "memo_compiled::smooth",
    lambda ctx, grad: grad / (1 + ctx.saved_tensors[0].square()),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
    lib=_LIBRARY,
)


def breaks_off(x: torch.Tensor) -> torch.Tensor:
    """Some of its operators run in Python."""
    x = x.tanh()
    torch._dynamo.graph_break()
    return x * (1 + 0 * float(x.detach().sum()))


def saves_in_python(x: torch.Tensor) -> torch.Tensor:
    """Its operator's formula is Python, which saves a tensor."""
    y: torch.Tensor = torch.ops.memo_compiled.smooth(x)
    return y.tanh()


class Compiled(nn.Module):
    def __init__(self, parts: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)
        self.compiled = torch.compile(lambda x: parts(self.inner(x)), backend="aot_eager")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.compiled(x)


@pytest.mark.parametrize("parts", [breaks_off, saves_in_python])
def test_dynamo_traces_nothing_of_memo(parts: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def run(alpha: float | None) -> tuple[int, list[torch.Tensor]]:
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        torch.manual_seed(0)
        model = nn.Sequential(nn.ModuleList([Compiled(parts), Compiled(parts)]))
        manager = None if alpha is None else memo.offload(model, alpha=alpha, host="1MiB", min_bytes=1)
        for _ in range(2):
            x = torch.ones(2, 32, 16, requires_grad=True)
            with manager or contextlib.nullcontext():
                for layer in model[0]:  # type: ignore[attr-defined]
                    x = layer(x)
            x.sum().backward()
        return torch._dynamo.utils.counters["frames"]["total"], gradients(model)

    frames, want = run(None)
    assert frames > 1
    for alpha in (1.0, 0.0):
        found, got = run(alpha)
        assert found == frames
        assert all(map(torch.equal, got, want))
