"""`memo.linear_cross_entropy` of one rank: the loss and gradients of the logits, from whatever holds the matrix."""

from __future__ import annotations

import copy
import re
from typing import Any, Literal

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


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_bias_a_scale_and_a_cap_count(reduction: Literal["mean", "sum"]) -> None:
    torch.manual_seed(0)
    ours = nn.Linear(HIDDEN, VOCAB).double()
    theirs = copy.deepcopy(ours)
    x, targets = torch.randn(2, 9, HIDDEN, dtype=torch.float64), torch.randint(VOCAB, (2, 9))
    targets[0, 3:5] = 7
    capped = torch.tanh(theirs(x) * 0.5 / 3.0) * 3.0
    want = F.cross_entropy(capped.flatten(0, 1), targets.flatten(), ignore_index=7, reduction=reduction)
    done = {"scale": 0.5, "soft_cap": 3.0, "ignore_index": 7, "reduction": reduction}
    got = memo.linear_cross_entropy(x, ours, targets, chunk=4, **done)
    want.backward()
    got.backward()
    torch.testing.assert_close(got, want, rtol=1e-12, atol=0)
    for name in ("weight", "bias"):
        torch.testing.assert_close(getattr(ours, name).grad, getattr(theirs, name).grad, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"soft_cap": 0.0}, "soft_cap: 0.0 is not a finite number above 0"),
        ({"soft_cap": -30.0}, "soft_cap: -30.0 is not a finite number above 0"),
        ({"scale": float("nan")}, "scale: nan is not a finite number"),
        ({"reduction": "none"}, "reduction: 'none' is neither 'mean' nor 'sum'"),
    ],
)
def test_arguments_that_mean_nothing_are_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        memo.linear_cross_entropy(torch.zeros(1, HIDDEN), torch.zeros(VOCAB, HIDDEN), torch.tensor([0]), **wrong)


@pytest.mark.parametrize("keep_gradients", [True, False])
@pytest.mark.parametrize("shape", [(2,), (1, 2), (4, 1), ()])
def test_targets_of_another_count_are_refused(shape: tuple[int, ...], keep_gradients: bool) -> None:
    hidden, targets = torch.zeros(3, HIDDEN, requires_grad=True), torch.zeros(shape, dtype=torch.int64)
    with pytest.raises(UsageError, match=re.escape(f"targets: shape {shape}, hidden has (3,) tokens")):
        memo.linear_cross_entropy(hidden, torch.zeros(VOCAB, HIDDEN), targets, keep_gradients=keep_gradients)
