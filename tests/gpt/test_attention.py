"""Attention: only fused kernels, in every precision, forward and backward; shared heads equal repeated ones."""

from __future__ import annotations

import sys
import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from memo.gpt.attention import Kernel, attend, choose_kernel
from memo.gpt.config import Variant, preset
from memo.gpt.model import GPT

FLASH = {"_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_flash_attention_for_cpu_backward"}


class Seen(TorchDispatchMode):
    """Names of the operations that ran, and the largest tensor any of them made."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.names.add(func.overloadpacket.__name__)
        for value in result if isinstance(result, tuple | list) else (result,):
            if isinstance(value, torch.Tensor):
                self.largest = max(self.largest, value.untyped_storage().nbytes() // value.element_size())
        return result

    @property
    def attention(self) -> set[str]:
        return {name for name in self.names if "attention" in name or "softmax" in name or "bmm" in name}


def _qkv(
    heads: int, kv_heads: int, dtype: torch.dtype, seq: int = 48, d: int = 16
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, seq, n, d, dtype=dtype) for n in (heads, kv_heads, kv_heads))
    return query.requires_grad_(), key.requires_grad_(), value.requires_grad_()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_only_the_fused_kernel_runs_on_a_cpu(dtype: torch.dtype, kv_heads: int) -> None:
    query, key, value = _qkv(4, kv_heads, dtype)
    with Seen() as seen:
        attend(query, key, value).sum().backward()
    assert seen.attention == FLASH


@pytest.mark.parametrize("variant", ["gpt", "llama"])
def test_nothing_in_a_training_step_is_quadratic(variant: Variant) -> None:
    seq = 2048
    config = preset("tiny", variant=variant, layers=2, hidden=32, heads=4, max_seq=seq)
    model = GPT(config)
    tokens = torch.randint(0, config.vocab_size, (1, seq))
    with Seen() as seen:
        model(tokens, tokens).backward()
    assert seen.attention == FLASH
    assert seen.largest <= seq * config.vocab_size < seq * seq // 4


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_shared_heads_equal_repeated_ones(kv_heads: int) -> None:
    query, key, value = _qkv(4, kv_heads, torch.float64)
    upstream = torch.randn(2, 48, 4, 16, dtype=torch.float64)
    shared = attend(query, key, value)
    grads = torch.autograd.grad(shared, (query, key, value), upstream)

    scores = torch.einsum("bqnd,bknd->bnqk", query, key.repeat_interleave(4 // kv_heads, 2)) / 4.0
    scores = scores.masked_fill(torch.ones(48, 48).triu(1).bool(), -torch.inf)
    plain = torch.einsum("bnqk,bknd->bqnd", scores.softmax(-1), value.repeat_interleave(4 // kv_heads, 2))
    plain_grads = torch.autograd.grad(plain, (query, key, value), upstream)

    torch.testing.assert_close(shared, plain, rtol=0, atol=1e-12)
    torch.testing.assert_close(grads, plain_grads, rtol=0, atol=1e-12)


def test_repeating_heads_gives_the_same_result(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, value = _qkv(4, 2, torch.float64)
    grouped = attend(query, key, value)
    monkeypatch.setattr("memo.gpt.attention.choose_kernel", lambda device, dtype: Kernel.REPEATED)
    torch.testing.assert_close(attend(query, key, value), grouped, rtol=0, atol=1e-14)


def test_a_later_token_changes_nothing_earlier() -> None:
    query, key, value = _qkv(2, 2, torch.float32)
    before = attend(query, key, value)[:, :40]
    with torch.no_grad():
        key[:, 40:] += 1.0
        value[:, 40:] += 1.0
    assert torch.equal(attend(query, key, value)[:, :40], before)


@pytest.mark.parametrize(
    ("device", "dtype", "installed", "kernel"),
    [
        ("cpu", torch.float32, True, Kernel.GROUPED),
        ("cpu", torch.bfloat16, True, Kernel.GROUPED),
        ("cuda", torch.bfloat16, True, Kernel.FLASH_ATTN),
        ("cuda", torch.float16, True, Kernel.FLASH_ATTN),
        ("cuda", torch.bfloat16, False, Kernel.GROUPED),
        ("cuda", torch.float32, True, Kernel.REPEATED),
        ("cuda", torch.float32, False, Kernel.REPEATED),
    ],
)
def test_the_choice_of_kernel(device: str, dtype: torch.dtype, installed: bool, kernel: Kernel) -> None:
    assert choose_kernel(device, dtype, flash_attn=installed) is kernel


def test_the_package_gets_its_own_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    def flash_attn_func(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, causal: bool) -> torch.Tensor:
        assert causal
        assert q.shape == (2, 48, 4, 16)
        assert k.shape == v.shape == (2, 48, 2, 16)
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)

    package = types.ModuleType("flash_attn")
    package.flash_attn_func = flash_attn_func  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    query, key, value = _qkv(4, 2, torch.float32)
    expected = attend(query, key, value)
    monkeypatch.setattr("memo.gpt.attention.choose_kernel", lambda device, dtype: Kernel.FLASH_ATTN)
    assert torch.equal(attend(query, key, value), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_long_attention_on_a_gpu_stays_linear_in_memory(dtype: torch.dtype) -> None:
    seq, heads = 32768, 8
    query, key, value = (
        torch.randn(1, seq, n, 64, device="cuda", dtype=dtype, requires_grad=True) for n in (heads, 2, 2)
    )
    torch.cuda.reset_peak_memory_stats()
    attend(query, key, value).sum().backward()
    # Scores alone would be seq * seq elements; everything here is a small multiple of seq * heads * 64.
    assert torch.cuda.max_memory_allocated() < 40 * seq * heads * 64 * query.element_size()
