"""Metrics of a step: the three utilisations, differences of counters, memory of this process alone."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from memo.gpt import Precision, preset
from memo.gpt.arithmetic.flops import recompute_flops_per_token
from memo.gpt.train.step import StepResult
from memo.gpt.train.step_metrics import StepMeter
from memo.machine import peak_rss_bytes
from memo.mip.inputs import peak_flops

SHAPE = preset("tiny")
SEQ = 1024


def manager() -> Any:
    counters = dict.fromkeys(("bytes_host", "bytes_disk", "bytes_reloaded", "bytes_recomputed"), 0)
    return SimpleNamespace(stats=SimpleNamespace(**counters, stall_s=0.0, recompute_s=0.0))


def meter(*, peak: float | None = None, source: Any = None, alpha: float | None = None) -> StepMeter:
    return StepMeter(
        SHAPE,
        seq=SEQ,
        device=torch.device("cpu"),
        precision=Precision.FP32,
        peak=peak,
        manager=source,
        alpha=alpha,
    )


def result(duration_s: float = 2.0) -> StepResult:
    return StepResult(step=1, loss=1.0, grad_norm=1.0, lr=1e-3, duration_s=duration_s, tokens=SEQ)


def test_without_a_known_peak_there_is_no_utilisation() -> None:
    metrics, _ = meter().measure(result())
    assert (metrics.mfu_causal, metrics.mfu_full, metrics.hfu) == (None, None, None)
    assert metrics.tokens_per_s == SEQ / 2
    assert metrics.peak_device_bytes is None


def test_the_three_utilisations_differ_by_attention_and_by_recompute() -> None:
    source = manager()
    subject = meter(peak=1e12, source=source, alpha=0.25)
    metrics, _ = subject.measure(result())
    assert metrics.mfu_causal is not None
    assert metrics.mfu_full is not None
    attention = 6 * SHAPE.layers * SHAPE.hidden * SEQ * (SEQ / 2) / 1e12
    assert metrics.mfu_full - metrics.mfu_causal == pytest.approx(attention, rel=1e-9)
    assert metrics.hfu == metrics.mfu_causal
    source.stats.bytes_recomputed = 1
    metrics, _ = subject.measure(result())
    assert metrics.hfu is not None
    assert metrics.mfu_causal is not None
    redone = recompute_flops_per_token(SHAPE, 0.75) * (SEQ / 2) / 1e12
    assert metrics.hfu - metrics.mfu_causal == pytest.approx(redone, rel=1e-9)


def test_a_step_counts_only_what_moved_since_the_step_before() -> None:
    source = manager()
    subject = meter(source=source)
    for total, expected in ((100, 100), (150, 50), (150, 0)):
        source.stats.bytes_disk, source.stats.stall_s = total, total / 4
        metrics, usage = subject.measure(result())
        assert (metrics.disk_bytes, metrics.stall_s) == (expected, expected / 4)
        assert usage.offloads


@pytest.mark.parametrize(
    ("name", "flops"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA GeForce GTX 980", None),
        ("NVIDIA L40", 181e12),
        ("NVIDIA A10G", 70e12),
    ],
)
def test_a_gpu_is_known_by_its_name_or_not_at_all(name: str, flops: float | None) -> None:
    assert peak_flops(name) == flops


def test_peak_memory_is_this_programs_and_freed_memory_goes_back() -> None:
    """A child of a large process does not inherit its peak, and 64 blocks of 1 MiB leave with free()."""
    ballast = bytearray(b"x" * (256 << 20))
    program = """
import ctypes, os
from memo.machine.process_memory import peak_rss_bytes, return_freed_memory
assert return_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
def resident(): return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
before = resident()
blocks = [libc.malloc(1 << 20) for _ in range(64)]
for block in blocks: ctypes.memset(block, 1, 1 << 20)
for block in blocks[:-1]: libc.free(block)
print(before, resident(), peak_rss_bytes())
"""
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    before, after, peak = map(int, output.split())
    assert peak_rss_bytes() > len(ballast)
    # Linux counts resident pages per processor and adds them up in batches: its figures lag by a few hundred KiB.
    assert before + (60 << 20) <= peak < 256 << 20
    assert after < before + (8 << 20)  # the last block, which would pin a heap below it, and little more
