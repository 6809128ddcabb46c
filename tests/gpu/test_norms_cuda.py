"""torch's norms of 2^32 elements and of more, which `memo.machine.norm_limit` relies on. Run by `make gpu-check`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from memo.machine.norm_limit import NORM_ELEMENTS

pytestmark = pytest.mark.gpu
WIDTH = 4096
ROWS = NORM_ELEMENTS // WIDTH
LAST = 2
NEEDED = 5 * NORM_ELEMENTS * 2  # input, result, two gradients, and one to spare, in bfloat16


@pytest.fixture(autouse=True)
def _room() -> Iterator[None]:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    if free < NEEDED:
        pytest.skip(f"needs {NEEDED >> 30} GiB of device memory, {free >> 30} are free")
    yield
    torch.cuda.empty_cache()


def last_rows_are_right(norm: nn.Module, rows: int) -> bool:
    """Whether the last rows of many, all others zero, and their gradients are those of these rows alone."""
    generator = torch.Generator("cuda").manual_seed(0)
    some, upstream = (
        torch.randn(LAST, WIDTH, dtype=torch.bfloat16, device="cuda", generator=generator) for _ in range(2)
    )
    want, want_gradient = _forward_backward(norm, some, upstream)
    many, many_upstream = (torch.zeros(rows, WIDTH, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    many[-LAST:], many_upstream[-LAST:] = some, upstream
    got, got_gradient = _forward_backward(norm, many, many_upstream)
    return torch.equal(got, want) and torch.equal(got_gradient, want_gradient)


def _forward_backward(norm: nn.Module, x: torch.Tensor, upstream: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    x.requires_grad_()
    out = norm(x)
    (gradient,) = torch.autograd.grad(out, x, upstream)
    return out.detach()[-LAST:].clone(), gradient[-LAST:].clone()


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_norms_are_right_up_to_what_memo_lets_through(norm: type[nn.Module]) -> None:
    assert last_rows_are_right(norm(WIDTH, device="cuda", dtype=torch.bfloat16), ROWS)


@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.RMSNorm])
def test_norms_of_more_are_wrong_which_memo_refuses(norm: type[nn.Module]) -> None:
    """Where this fails, torch has learned to count: let this version through in memo.machine.norm_limit."""
    assert not last_rows_are_right(norm(WIDTH, device="cuda", dtype=torch.bfloat16), ROWS + LAST)
