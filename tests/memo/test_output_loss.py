"""`memo.linear_cross_entropy` of one rank: the loss and gradients of the logits, from whatever holds the matrix."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import memo
from memo.errors import UsageError

VOCAB, HIDDEN = 37, 16


def projection_of(kind: str) -> nn.Module:
    torch.manual_seed(0)
    made = nn.Embedding(VOCAB, HIDDEN) if kind == "embedding" else nn.Linear(HIDDEN, VOCAB, bias=False)
    return made.double()


@pytest.mark.parametrize("keep_gradients", [True, False])
@pytest.mark.parametrize("kind", ["linear", "embedding", "matrix"])
def test_it_is_the_loss_of_the_logits(kind: str, keep_gradients: bool) -> None:
    ours, theirs = projection_of(kind), projection_of(kind)
    x = torch.randn(2, 9, HIDDEN, dtype=torch.float64, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    targets = torch.randint(VOCAB, (2, 9))
    targets[1, 4:7] = -100
    given = ours.weight if kind == "matrix" else ours
    loss = memo.linear_cross_entropy(x, given, targets, chunk=4, keep_gradients=keep_gradients)
    want = F.cross_entropy((y @ theirs.weight.T).flatten(0, 1), targets.flatten())
    loss.backward()
    want.backward()
    torch.testing.assert_close(loss, want, rtol=1e-12, atol=0)
    torch.testing.assert_close(x.grad, y.grad, rtol=1e-9, atol=1e-15)
    torch.testing.assert_close(ours.weight.grad, theirs.weight.grad, rtol=1e-9, atol=1e-15)


def test_a_bias_is_not_left_out_silently() -> None:
    with pytest.raises(UsageError, match="a Linear with a bias is more than a matrix"):
        memo.linear_cross_entropy(torch.zeros(1, HIDDEN), nn.Linear(HIDDEN, VOCAB), torch.zeros(1, dtype=torch.int64))
