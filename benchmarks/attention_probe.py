"""Seconds of one layer's attention, forward and backward, by the kernel that the model will use."""

from __future__ import annotations

import dataclasses
import time
from typing import TYPE_CHECKING

import torch

from benchmarks.comparison import synchronize
from memo.gpt.model.attention import attend
from memo.gpt.model.attention_kernel import AttentionKind, Kernel, choose, is_refusal, refuse

if TYPE_CHECKING:
    from memo.gpt.config import GPTConfig

SHORT_TOKENS = 8192
LIMIT_S = 5.0
"""For the long call, as extrapolated from the short one; above it the length is halved until it fits."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionTime:
    """Time of one layer's attention, forward and backward."""

    kernel: str
    tokens: int
    """Of the call that was timed."""
    seconds: float
    """At the full length: that call's, times the square of the ratio of the lengths."""


def probe_attention(config: GPTConfig, device: torch.device, dtype: torch.dtype) -> AttentionTime:
    """Times attention once, at the full length or the longest part of it that `LIMIT_S` allows.

    A kernel that refuses in backward, too late for a model to turn to the next, is refused for the whole process here.
    """
    while True:
        kind = AttentionKind(
            device=device, dtype=dtype, heads=config.heads, kv_heads=config.kv_heads, head_dim=config.head_dim
        )
        choice = choose(kind)
        try:
            return _probed(config, device, dtype, str(choice))
        except RuntimeError as error:
            if choice.kernel is Kernel.MATH or not is_refusal(error):
                raise
            if choose(kind) == choice:  # forward's refusal has been dealt with there
                refuse(kind, choice.kernel, error)


def _probed(config: GPTConfig, device: torch.device, dtype: torch.dtype, kernel: str) -> AttentionTime:
    seq, short = config.max_seq, min(SHORT_TOKENS, config.max_seq)
    _timed(config, short, device, dtype)  # kernels are chosen and compiled
    expected_s = _timed(config, short, device, dtype) * (seq / short) ** 2
    tokens = seq
    while expected_s * (tokens / seq) ** 2 > LIMIT_S and tokens // 2 >= short:
        tokens //= 2
    seconds = _timed(config, tokens, device, dtype)
    return AttentionTime(kernel=kernel, tokens=tokens, seconds=seconds * (seq / tokens) ** 2)


def _timed(config: GPTConfig, tokens: int, device: torch.device, dtype: torch.dtype) -> float:
    """With a gradient in memory, as a model's: a sum's has stride 0, for which kernels copy or refuse."""
    query, key, value = (
        torch.randn((1, tokens, heads, config.head_dim), device=device, dtype=dtype, requires_grad=True)
        for heads in (config.heads, config.kv_heads, config.kv_heads)
    )
    gradient = torch.randn_like(query)
    synchronize(device)
    begin = time.perf_counter()
    attend(query, key, value).backward(gradient)
    synchronize(device)
    return time.perf_counter() - begin
