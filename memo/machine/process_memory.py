"""What this process takes from the machine: its peak of resident memory, and giving freed memory back.

On a CPU run the activations are ordinary heap memory, so the peak of resident memory is the figure that corresponds to
`max_memory_allocated` on a GPU.
"""

from __future__ import annotations

import ctypes
import os
import resource
import sys

__all__ = ["peak_rss_bytes", "return_freed_memory", "rss_bytes", "total_bytes"]

_M_MMAP_THRESHOLD = -3  # <malloc.h>
_M_TRIM_THRESHOLD = -1
# Larger blocks get a mapping of their own, which free() returns to the system at once. glibc's default grows with every
# such block that is freed, up to 32 MiB; from then on freed activations below that size stay resident in the heap.
_MMAP_THRESHOLD_BYTES = 256 << 10


def peak_rss_bytes() -> int:
    """The largest resident set this program has had.

    Linux's VmHWM belongs to this program alone; getrusage's figure also remembers the process that started it.
    """
    peak = _status("VmHWM:")
    if peak is not None:
        return peak
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10  # macOS counts bytes, others KiB


def rss_bytes() -> int:
    """The resident set now; its peak where the system does not tell."""
    now = _status("VmRSS:")
    return peak_rss_bytes() if now is None else now


def _status(name: str) -> int | None:
    """A figure that Linux keeps of this process."""
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as status:
            return next((int(line.split()[1]) << 10 for line in status if line.startswith(name)), None)
    except OSError:
        return None


def total_bytes() -> int:
    """Physical memory of the machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def return_freed_memory() -> bool:
    """Makes free() of a tensor return its pages to the system; False where the C library is not glibc."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    mallopt.argtypes = [ctypes.c_int, ctypes.c_int]
    return bool(mallopt(_M_MMAP_THRESHOLD, _MMAP_THRESHOLD_BYTES) and mallopt(_M_TRIM_THRESHOLD, _MMAP_THRESHOLD_BYTES))
