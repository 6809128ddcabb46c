"""Rates of a device's kernels, measured: a matrix product, attention in both directions, a copy, and launches."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

HEADS = (64, 128)
"""Head sizes, of as many heads each that a layer is 1024 wide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionRate:
    """Causal attention as torch.nn.functional.scaled_dot_product_attention computes it, in bfloat16.

    FLOPs are those of the causal half: backward's 2.5 times forward's.
    """

    head: int
    tokens: int
    forward_flops_per_s: float
    backward_flops_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRates:
    """Rates of one device while nothing else runs on it."""

    product_flops_per_s: float
    """A large matrix product in bfloat16."""
    copy_bytes_per_s: float
    """Bytes read and written by a copy within the device's memory."""
    launch_s: float
    """An operator of PyTorch on a tensor of few bytes, from call to call."""
    attention: tuple[AttentionRate, ...]


def measure_kernels(device: torch.device, *, seconds: float, small: bool | None = None) -> KernelRates:
    """Measures for about `seconds`, and as long as one call of each takes.

    Args:
        device: the device, of which 1.5 GiB are taken.
        seconds: of all measurements together.
        small: sizes at which the same code can be tried on a CPU, and which say nothing; None: on a CPU.
    """
    small = device.type == "cpu" if small is None else small
    side, copied, lengths = (256, 4 << 20, (128, 256, 512)) if small else (8192, 512 << 20, (4096, 16384, 65536))
    each_s = seconds / (3 + 2 * len(HEADS) * len(lengths))
    few = torch.ones(8, device=device)
    launch_s = _seconds(device, lambda: few.add_(1.0), each_s)
    return KernelRates(
        product_flops_per_s=_product_flops_per_s(device, side, each_s),
        copy_bytes_per_s=_copy_bytes_per_s(device, copied, each_s),
        launch_s=launch_s,
        attention=tuple(_attention(device, head, tokens, each_s) for head in HEADS for tokens in lengths),
    )


def _product_flops_per_s(device: torch.device, side: int, seconds: float) -> float:
    left, right = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    return 2 * side**3 / _seconds(device, lambda: left @ right, seconds)


def _copy_bytes_per_s(device: torch.device, nbytes: int, seconds: float) -> float:
    source = torch.ones(nbytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * nbytes / _seconds(device, lambda: target.copy_(source), seconds)


def _attention(device: torch.device, head: int, tokens: int, seconds: float) -> AttentionRate:
    shape = (1, 1024 // head, tokens, head)
    query, key, value = (torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))

    def forward() -> torch.Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True)

    result = forward()
    gradient = torch.randn_like(result)
    inputs = (query, key, value)
    backward_s = _seconds(device, lambda: torch.autograd.grad(result, inputs, gradient, retain_graph=True), seconds)
    flops = 2.0 * 1024 * tokens**2
    return AttentionRate(
        head=head,
        tokens=tokens,
        forward_flops_per_s=flops / _seconds(device, forward, seconds),
        backward_flops_per_s=2.5 * flops / backward_s,
    )


def _seconds(device: torch.device, call: Callable[[], object], seconds: float) -> float:
    """Mean seconds of a call, one after the other for as long, after one that warms up."""
    call()
    _wait_for(device)
    begin, calls, batch = time.perf_counter(), 0, 1
    while not calls or time.perf_counter() - begin < seconds:
        for _ in range(batch):
            call()
        _wait_for(device)
        calls, batch = calls + batch, min(2 * batch, 1000)  # so that waiting is no part of it
    return (time.perf_counter() - begin) / calls


def _wait_for(device: torch.device) -> None:
    if device.type != "cpu":
        torch.cuda.synchronize(device)
