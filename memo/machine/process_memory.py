"""Resident memory of this process: its current and peak size, and the return of freed memory to the system.

In a CPU run activations are ordinary heap memory, so peak resident memory corresponds to `max_memory_allocated` on a
GPU.
"""

from __future__ import annotations

import ctypes
import resource
import sys

__all__ = ["peak_rss_bytes", "return_freed_memory", "rss_bytes"]

_M_MMAP_THRESHOLD = -3  # <malloc.h>
_M_TRIM_THRESHOLD = -1
# glibc gives larger blocks a mapping of their own, which free() unmaps at once. By default this threshold grows with
# every such block that is freed, up to 32 MiB; freed activations below it stay resident in the heap.
_MMAP_THRESHOLD_BYTES = 256 << 10


def peak_rss_bytes() -> int:
    """Returns the peak resident set size.

    On Linux VmHWM, which counts this program only; the value of getrusage includes the process that started it.
    """
    peak = _status("VmHWM:")
    if peak is not None:
        return peak
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10  # macOS counts bytes, others KiB


def rss_bytes() -> int:
    """Returns the current resident set size; the peak where the system does not report it."""
    now = _status("VmRSS:")
    return peak_rss_bytes() if now is None else now


def _status(name: str) -> int | None:
    """Value of a line of /proc/self/status, in bytes; None where it is missing."""
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as status:
            return next((int(line.split()[1]) << 10 for line in status if line.startswith(name)), None)
    except OSError:
        return None


def return_freed_memory() -> bool:
    """Makes free() of tensors return their pages to the system; False where the C library is not glibc."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    mallopt.argtypes = [ctypes.c_int, ctypes.c_int]
    return bool(mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES) and mallopt(_M_TRIM_THRESHOLD, _MMAP_THRESHOLD_BYTES))
