"""How much memory training has on its device and how much it takes: what a plan's device budget is measured with.

On a GPU that is the allocator's count, torch's or the planned one's; on a CPU, where host memory is the device, the
process's resident set.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

import torch

from memo.allocator import allocated_bytes, peak_allocated_bytes, restart_peaks
from memo.machine import peak_rss_bytes, rss_bytes
from memo.swap import available_host_bytes, local_part

__all__ = ["DeviceBudget", "device_memory", "gradients_to_come"]

USABLE = 0.94
"""Of a GPU's memory: the context, libraries' workspaces and what an allocator cannot fill take the rest."""
USABLE_RSS = 0.8
"""Of what host memory is free on a CPU, which is everybody's."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBudget:
    """Of one process."""

    total_bytes: int
    """What training may take in all."""
    peak_bytes: Callable[[], int]
    """The most that was in use since the last `restart`."""
    restart: Callable[[], None]
    now_bytes: Callable[[], int] = lambda: 0
    """In use at this moment."""
    falls_at_once: bool = True
    """What is let go of counts no more, so that each part of a step has a peak of its own."""


def device_memory(device: torch.device, budget: int | None) -> DeviceBudget:
    """With `budget`, or all that there is."""
    if device.type == "cuda":
        total = int(torch.cuda.get_device_properties(device).total_memory * USABLE)
        return DeviceBudget(
            total_bytes=total if budget is None else min(total, budget),
            # torch.cuda's own functions raise where another allocator than torch's serves the device.
            peak_bytes=lambda: peak_allocated_bytes(device),
            restart=lambda: restart_peaks(device),
            now_bytes=lambda: allocated_bytes(device),
        )
    return DeviceBudget(
        total_bytes=int(peak_rss_bytes() + available_host_bytes() * USABLE_RSS) if budget is None else budget,
        peak_bytes=peak_rss_bytes,
        restart=_forget_peak_rss,
        now_bytes=rss_bytes,
        falls_at_once=False,  # the C library keeps what it was given back
    )


def gradients_to_come(parameters: Iterable[torch.Tensor]) -> int:
    """Bytes that the gradients will take which are not there now."""
    missing = (parameter for parameter in parameters if parameter.requires_grad and parameter.grad is None)
    return sum(local_part(parameter.detach()).nbytes for parameter in missing)


def _forget_peak_rss() -> None:
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as control:
            control.write("5")  # proc(5): resets the peak resident set to the current one
    except OSError:
        pass  # the peak then stays that of the whole run: more is held back than need be
