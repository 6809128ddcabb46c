"""Norms, GELU and SwiGLU written into tails: right to the rounding, the same for a token wherever it is computed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from memo.errors import UsageError
from memo.kernels import tails

DTYPES = (torch.float32, torch.bfloat16)
SHAPES = ((1, 5, 1), (1, 9, 33), (3, 7, 40), (2, 6, 257), (4, 3, 1000))
Into = Callable[..., None]


def _inputs(shape: tuple[int, int, int], dtype: torch.dtype, device: torch.device | str) -> dict[str, torch.Tensor]:
    torch.manual_seed(sum(shape))
    tensors = {name: torch.randn(shape) for name in ("x", "up")}
    tensors |= {name: torch.randn(shape[-1]) for name in ("weight", "bias")}
    return {name: tensor.to(dtype).to(device) for name, tensor in tensors.items()}


def _run(name: str, into: Any, out: torch.Tensor, given: dict[str, torch.Tensor]) -> None:
    """`into` is the public module, or that of the kernels."""
    kernels = not hasattr(into, f"{name}_into")
    function = getattr(into, name if kernels else f"{name}_into")
    eps = (1e-5,) if kernels else ()
    keyword = {} if kernels else {"eps": 1e-5}
    if name == "rms_norm":
        function(out, given["x"], given["weight"], *eps, **keyword)
    elif name == "layer_norm":
        function(out, given["x"], given["weight"], given.get("bias"), *eps, **keyword)
    elif name == "gelu":
        function(out, given["x"])
    elif kernels:
        function(out, given["x"], given["up"], None)
    else:
        function(out, given["x"], given["up"])


def _exact(name: str, given: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """(result in float64, the magnitude that its rounding errors are relative to)."""
    wide = {key: tensor.double() for key, tensor in given.items()}
    x, width = wide["x"], given["x"].shape[-1:]
    if name == "rms_norm":
        out = F.rms_norm(x, width, wide["weight"], 1e-5)
        return out, out.abs()
    if name == "layer_norm":
        out = F.layer_norm(x, width, wide["weight"], wide.get("bias"), 1e-5)
        # The mean is subtracted and the bias added: both lose what cancels.
        spread = (x.var(-1, correction=0, keepdim=True) + 1e-5).sqrt()
        bias = wide["bias"].abs() if "bias" in wide else 0
        return out, (x.abs() + x.abs().mean(-1, keepdim=True)) / spread * wide["weight"].abs() + bias
    if name == "gelu":
        return F.gelu(x), x.abs()  # 1 + erf cancels where x is far below zero
    silu = F.silu(given["x"].double()).to(given["x"].dtype).double()
    return silu * wide["up"], (silu * wide["up"]).abs()


def _tail(shape: tuple[int, int, int], like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(a buffer of threes with room for two tokens before those of `shape`, the view of the others)."""
    rows, tokens, width = shape
    buffer = torch.full((rows, tokens + 2, width), 3.0, dtype=like.dtype, device=like.device)
    return buffer, buffer[:, 2:]


NAMES = ("rms_norm", "layer_norm", "gelu", "swiglu")


def _check(name: str, shape: tuple[int, int, int], dtype: torch.dtype, into: Any, device: torch.device | str) -> None:
    given = _inputs(shape, dtype, device)
    buffer, out = _tail(shape, given["x"])
    _run(name, into, out, given)
    exact, magnitude = _exact(name, given)
    # Half a unit in the last place of the result's type (a whole one where silu's own rounding may go either way), and
    # float32's rounding inside: the sum over `width` adds in pairs or better, everything else is a handful of operations.
    own = torch.finfo(dtype).eps * exact.abs() * (1.01 if name == "swiglu" else 0.501)
    inside = (6 + shape[-1].bit_length()) * torch.finfo(torch.float32).eps * magnitude
    assert ((out.double() - exact).abs() <= own + inside).all()
    assert (buffer[:, :2] == 3).all()


def _check_tokens_stand_alone(
    name: str, shape: tuple[int, int, int], dtype: torch.dtype, into: Any, device: torch.device | str
) -> None:
    given = _inputs(shape, dtype, device)
    whole = torch.empty_like(given["x"])
    _run(name, into, whole, given)
    for first in range(shape[1]):
        cut = {key: value[:, first:] if value.ndim == 3 else value for key, value in given.items()}
        for contiguous in (False, True):
            some = {key: value.contiguous() for key, value in cut.items()} if contiguous else cut
            buffer = torch.zeros_like(whole)
            _run(name, into, buffer[:, first:], some)
            assert torch.equal(buffer[:, first:], whole[:, first:])
            assert not buffer[:, :first].any()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_reference_is_right_to_the_rounding(name: str, dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    _check(name, shape, dtype, tails, "cpu")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 9, 32), (3, 7, 64), (2, 3, 1024)])
def test_a_tokens_result_depends_on_no_other_token(name: str, dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    _check_tokens_stand_alone(name, shape, dtype, tails, "cpu")


@pytest.mark.parametrize("keeps", [False, True])
def test_swiglu_also_gives_what_autograd_saves(keeps: bool) -> None:
    given = _inputs((2, 5, 24), torch.bfloat16, "cpu")
    out, silu = torch.empty_like(given["x"]), torch.empty_like(given["x"])
    tails.swiglu_into(out, given["x"], given["up"], activated=silu if keeps else None)
    assert torch.equal(out, F.silu(given["x"]) * given["up"])
    assert not keeps or torch.equal(silu, F.silu(given["x"]))


def test_tensors_that_differ_are_refused() -> None:
    with pytest.raises(UsageError, match="one shape, type and device"):
        tails.gelu_into(torch.zeros(3, 4), torch.zeros(3, 5))
    with pytest.raises(UsageError, match="one shape, type and device"):
        tails.rms_norm_into(torch.zeros(3, 4), torch.zeros(3, 4).double(), torch.ones(4), eps=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_is_right_to_the_rounding(
    name: str, dtype: torch.dtype, shape: tuple[int, int, int], device: torch.device
) -> None:
    from memo.kernels import tails_triton

    _check(name, shape, dtype, tails_triton, device)


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES[1:3])
def test_a_tokens_result_depends_on_no_other_token_in_the_kernel(
    name: str, dtype: torch.dtype, shape: tuple[int, int, int], device: torch.device
) -> None:
    from memo.kernels import tails_triton

    _check_tokens_stand_alone(name, shape, dtype, tails_triton, device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_kernel_gives_what_autograd_saves(dtype: torch.dtype, device: torch.device) -> None:
    from memo.kernels import tails_triton

    given = _inputs((2, 5, 24), dtype, device)
    buffer, silu = _tail((2, 5, 24), given["x"])
    out = torch.empty_like(given["x"])
    tails_triton.swiglu(out, given["x"], given["up"], silu)
    assert torch.equal(out, silu * given["up"])
    torch.testing.assert_close(silu, F.silu(given["x"]), rtol=2 * torch.finfo(dtype).eps, atol=0)
    assert (buffer[:, :2] == 3).all()


@pytest.mark.gpu
def test_a_norm_without_bias_and_values_far_from_zero(device: torch.device) -> None:
    from memo.kernels import tails_triton

    given = _inputs((2, 5, 100), torch.float32, device)
    given["x"] += 1000.0  # a variance from the mean of squares would be lost
    del given["bias"]
    out = torch.empty_like(given["x"])
    tails_triton.layer_norm(out, given["x"], given["weight"], None, 1e-5)
    exact, magnitude = _exact("layer_norm", given)
    assert ((out.double() - exact).abs() <= 13 * torch.finfo(torch.float32).eps * magnitude).all()


@pytest.mark.gpu
def test_layouts_that_no_launch_covers_are_refused(device: torch.device) -> None:
    from memo.kernels import tails_triton

    square = torch.zeros(4, 4, device=device)
    with pytest.raises(UsageError, match="contiguous"):
        tails_triton.gelu(square.T, square)
    with pytest.raises(UsageError, match="contiguous"):
        tails_triton.rms_norm(square.T, square, square[0], 1e-5)
    wide = torch.zeros(1, 65537, device=device)
    with pytest.raises(UsageError, match="at most 65536"):
        tails_triton.rms_norm(wide, wide, wide[0], 1e-5)
