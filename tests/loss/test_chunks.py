"""Bytes that the loss without logits moves, as they are predicted and as its operators move them."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from memo.loss import added_nbytes, chunked_linear_cross_entropy, moved_nbytes
from memo.swap.recompute.tape.work import work_of


class _Moved(TorchDispatchMode):
    """Bytes that operators read and write while it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        self.nbytes += work_of(func, args, kwargs or {}, out).nbytes
        return out


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_moved_bytes_are_those_of_the_operators(dtype: torch.dtype, trained: bool) -> None:
    tokens, vocab, hidden, chunk = 512, 4096, 8, 128
    x = torch.randn(tokens, hidden, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocab, hidden, dtype=dtype, requires_grad=trained)
    targets = torch.randint(0, vocab, (tokens,))
    with _Moved() as moved:
        chunked_linear_cross_entropy(x, weight, targets, chunk=chunk)
    # One chunk by the prediction's own rule, so that what each of the four adds is counted here.
    width = dtype.itemsize
    predicted = moved_nbytes(tokens, vocab, hidden, product_nbytes=width, trained=trained)
    predicted += (math.ceil(tokens / chunk) - 1) * added_nbytes(vocab * hidden, width) * trained
    # The log softmax reads the logits twice, and is counted once; weights and hidden states are small beside logits.
    assert moved.nbytes == pytest.approx(predicted - 4 * tokens * vocab, rel=0.03)
