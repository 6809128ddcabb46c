"""An MLP in tiles: the same bits as whole, in forward and in every gradient, with a tile of its memory."""

from __future__ import annotations

from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from live_bytes import LiveBytes

import memo
from memo.errors import UsageError
from memo.gpt import GPTConfig, Variant, preset
from memo.gpt.model import GPT
from memo.gpt.model.model import Mlp

HIDDEN = 64


def _config(tiles: int, variant: Variant = "gpt", **others: Any) -> GPTConfig:
    shape = {"layers": 2, "hidden": HIDDEN, "heads": 4, "max_seq": 1024, "mlp_tiles": tiles} | others
    return preset("tiny", variant=variant, **shape)


def _mlp(tiles: int, variant: Variant, dtype: torch.dtype, **others: Any) -> torch.nn.Module:
    torch.manual_seed(0)
    return Mlp(_config(tiles, variant, **others)).to(dtype)


def _results(mlp: torch.nn.Module, tokens: int, dtype: torch.dtype, autocast: bool = False) -> list[torch.Tensor]:
    """Output, gradient of the input, gradients of the parameters."""
    torch.manual_seed(1)
    x = torch.randn(2, tokens, HIDDEN).to(dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        out = mlp(x)
    upstream = torch.randn(out.shape).to(out.dtype)
    return [out, *torch.autograd.grad(out, [x, *mlp.parameters()], upstream)]


@pytest.mark.covering(2)
@pytest.mark.parametrize("variant", ["gpt", "llama"])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tiles", [2, 3, 8])
def test_tiles_give_the_same_bits(variant: Variant, bias: bool, dtype: torch.dtype, tiles: int) -> None:
    whole = _results(_mlp(1, variant, dtype, bias=bias), 512, dtype)
    tiled = _results(_mlp(tiles, variant, dtype, bias=bias), 512, dtype)
    assert len(tiled) == len(whole)
    for ours, theirs in zip(tiled, whole, strict=True):
        # The BLAS adds in another order for products of another shape, in float64; nothing of ours does.
        assert torch.equal(ours, theirs) or dtype is torch.float64
        assert (ours - theirs).norm() <= 2**-50 * theirs.norm()


@pytest.mark.parametrize("variant", ["gpt", "llama"])
def test_autocast_gives_the_same_bits(variant: Variant) -> None:
    whole = _results(_mlp(1, variant, torch.float32), 512, torch.float32, autocast=True)
    tiled = _results(_mlp(4, variant, torch.float32), 512, torch.float32, autocast=True)
    for ours, theirs in zip(tiled, whole, strict=True):
        assert ours.dtype is theirs.dtype
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("variant", ["gpt", "llama"])
@pytest.mark.parametrize("tokens", [1, 77, 129, 333])
def test_odd_lengths_are_as_close_as_float64_is(variant: Variant, tokens: int) -> None:
    whole = _results(_mlp(1, variant, torch.float64, ffn=300), tokens, torch.float64)
    tiled = _results(_mlp(3, variant, torch.float64, ffn=300), tokens, torch.float64)
    torch.testing.assert_close(tiled, whole, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("frozen", ["input", "weights"])
def test_what_needs_no_gradient_gets_none(frozen: str) -> None:
    mlp = _mlp(4, "gpt", torch.float32)
    x = torch.randn(1, 256, HIDDEN, requires_grad=frozen != "input")
    mlp.requires_grad_(frozen != "weights")
    mlp(x).sum().backward()
    assert (x.grad is None) == (frozen == "input")
    assert all((parameter.grad is None) == (frozen == "weights") for parameter in mlp.parameters())


def _bytes(tiles: int, tokens: int, variant: Variant) -> tuple[int, int, int]:
    """(peak of forward, kept for backward, peak of backward), beyond input and parameters."""
    mlp = _mlp(tiles, variant, torch.float32, ffn=2048)
    x = torch.randn(1, tokens, HIDDEN, requires_grad=True)
    with LiveBytes() as alive:
        out = mlp(x)
        forward, kept = alive.peak, alive.live
        out.backward(torch.ones_like(out))
    return forward, kept, alive.peak


@pytest.mark.parametrize(("variant", "wide"), [("gpt", 1), ("llama", 2)])
def test_no_more_than_a_tile_of_the_wide_activations_is_alive(variant: Variant, wide: int) -> None:
    tokens, tiles = 4096, 16
    narrow, activation, weights = tokens * HIDDEN * 4, tokens * 2048 * 4, (wide + 1) * 2048 * (HIDDEN + 1) * 4
    forward, kept, backward = _bytes(tiles, tokens, variant)
    assert kept == narrow  # the output; the input is the caller's
    # Of a tile: what the linears make, what the activation gives, and in backward the gradients of both, SwiGLU's silu
    # and its gradient among them.
    assert forward <= narrow + (wide + 2) * activation // tiles
    assert backward <= 3 * narrow + 2 * weights + 4 * (wide + 1) * activation // tiles
    whole_forward, whole_kept, whole_backward = _bytes(1, tokens, variant)
    assert whole_kept >= narrow + (wide + 1) * activation
    assert whole_backward >= narrow + (wide + 2) * activation
    assert forward < whole_forward / 4
    assert backward < whole_backward / 2


@pytest.mark.parametrize("variant", ["gpt", "llama"])
@pytest.mark.parametrize("alpha", [0.5, 1.0])
@pytest.mark.filterwarnings("ignore:layers")
def test_tiles_under_memo_train_bit_for_bit(variant: Variant, alpha: float) -> None:
    tokens = torch.randint(0, 257, (1, 512))
    torch.manual_seed(0)
    whole = GPT(_config(1, variant))
    tiled = GPT(_config(4, variant))
    tiled.load_state_dict(whole.state_dict())
    plain = torch.autograd.grad(whole(tokens, tokens), list(whole.parameters()))
    with closing(memo.offload(tiled, alpha=alpha, min_bytes=1, host="256MiB")) as manager:
        with manager:
            loss = tiled(tokens, tokens)
        grads = torch.autograd.grad(loss, list(tiled.parameters()))
        assert manager.stats.bytes_host > 0
    assert all(map(torch.equal, grads, plain))


def test_no_tiles_are_refused() -> None:
    with pytest.raises(UsageError, match="mlp_tiles is 0"):
        _config(0)


def test_weights_that_something_else_divided_are_refused(tmp_path: Path) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mlp = _mlp(4, "gpt", torch.float32)
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        parallelize_module(mlp, init_device_mesh("cpu", (1,)), {"up": ColwiseParallel(), "down": RowwiseParallel()})
        with pytest.raises(UsageError, match="not by memo's own tensor parallelism"):
            mlp(torch.zeros(1, 8, HIDDEN))
    finally:
        dist.destroy_process_group()
