"""Device memory of a training process: its budget, its use and its peak.

On a GPU these are the counters of the allocator in use, torch's or the planned one. On a CPU, where host memory is the
device, they are the process's resident set without the host tier's slab, which has a budget of its own. So that it counts
what is in use, free() returns large blocks to the system from the first budget on, and the heap is trimmed between two
layers for the others (memo.machine.process_memory).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import torch

from memo.allocator import allocated_bytes, peak_allocated_bytes, restart_peaks, use_expandable_segments
from memo.machine import (
    freed_memory_returns,
    peak_rss_bytes,
    restart_peak_rss,
    return_freed_memory,
    rss_bytes,
    trim_heap,
)
from memo.swap import available_host_bytes, local_part, touched_slab_bytes

USABLE = 0.94
"""Usable share of a GPU's memory; the CUDA context and library workspaces take the rest."""
USABLE_FIXED = 0.85
"""Usable fraction where the allocator's segments are of fixed size, which gaps between tensors fragment: an 8B model with
LoRA at 32k and 64k tokens on an H100 fits by plans within 0.88 of its memory (rehearsed), and not within 0.94 (measured)."""
USABLE_RSS = 0.8
"""Usable share of the free host memory on a CPU, which other processes share."""
UNSEEN_RSS_BYTES = 16 << 20
"""Bytes that a CPU process may still come to hold after it has been measured: staging blocks of a disk's I/O threads, four
of 4 MiB that become resident as they are first used, and code."""

RSS_NOISE_BYTES = 4 << 20
"""Bytes by which a plan's first step may hold more than steps under another plan let expect: pages that the heap keeps, and
tensors that another part of a layer holds. Measured: 2.0 MiB at most in 26 runs of benchmarks.device_budgets."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBudget:
    """Budget and counters of one process's device memory."""

    total_bytes: int
    """Bytes that training may use in all."""
    peak_bytes: Callable[[], int]
    """Returns the most bytes in use since the last `restart`."""
    restart: Callable[[], object]
    """Restarts the peak."""
    used_bytes: Callable[[], int] = lambda: 0
    """Returns the bytes in use now."""
    frees_at_once: bool = True
    """True: freed memory leaves the count at once, so that each part of a step has a peak of its own."""
    trim: Callable[[], object] | None = None
    """Makes freed memory leave the count, between two layers; None where it does by itself."""
    unseen_bytes: int = 0
    """Bytes that a first plan leaves free for what the steps before it may not have used yet."""
    noise_bytes: int = 0
    """Bytes that every plan leaves free, since the counter is not of tensors alone."""


def device_budget_of(device: torch.device, budget: int | None) -> DeviceBudget:
    """Returns a device's budget: `budget` bytes, or its usable memory for None. A GPU's is capped at that.

    From now on a CPU's process returns freed memory to the system, and torch's segments on a GPU are expandable, unless the
    program chose otherwise.
    """
    if device.type == "cuda":
        share = USABLE if use_expandable_segments(device) else USABLE_FIXED
        total = int(torch.cuda.get_device_properties(device).total_memory * share)
        return DeviceBudget(
            total_bytes=total if budget is None else min(total, budget),
            # torch.cuda's own functions raise where another allocator than torch's serves the device.
            peak_bytes=lambda: peak_allocated_bytes(device),
            restart=lambda: restart_peaks(device),
            used_bytes=lambda: allocated_bytes(device),
        )
    return_freed_memory()
    return DeviceBudget(
        total_bytes=int(_resident_bytes() + available_host_bytes() * USABLE_RSS) if budget is None else budget,
        peak_bytes=lambda: max(0, peak_rss_bytes() - touched_slab_bytes()),
        restart=restart_peak_rss,
        used_bytes=_resident_bytes,
        # Where the peak cannot be restarted it is that of the whole run, and plans use less memory than they might.
        frees_at_once=restart_peak_rss() and freed_memory_returns(),
        trim=trim_heap,
        unseen_bytes=UNSEEN_RSS_BYTES,
        noise_bytes=RSS_NOISE_BYTES,
    )


def _resident_bytes() -> int:
    return max(0, rss_bytes() - touched_slab_bytes())


def missing_gradient_bytes(parameters: Iterable[torch.Tensor], device: torch.device) -> int:
    """Bytes of the gradients that backward has still to allocate on the device, and that no hook takes as they are made."""
    trained = (parameter for parameter in parameters if parameter.requires_grad)
    missing = (one for one in trained if one.grad is None and not one._post_accumulate_grad_hooks)
    return sum(part.nbytes for part in map(local_part, missing) if part.device.type == device.type)
