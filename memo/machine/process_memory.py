"""Resident memory of this process: its current and peak size, and the return of freed memory to the system.

In a CPU run activations are ordinary heap memory, so peak resident memory corresponds to `max_memory_allocated` on a
GPU, once freed memory leaves it at once: `return_freed_memory`. Without, glibc keeps freed activations in its heap; on
one machine a training step whose tensors took 284 MiB was resident with 338.
"""

from __future__ import annotations

import ctypes
import functools
import heapq
import operator
import resource
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

_M_MMAP_THRESHOLD = -3  # <malloc.h>
_M_TRIM_THRESHOLD = -1
# glibc gives larger blocks a mapping of their own, which free() unmaps at once. By default this threshold grows with
# every such block that is freed, up to 32 MiB; freed activations below it stay resident in the heap.
_MMAP_THRESHOLD_BYTES = 256 << 10
_PROBE_BYTES = 8 << 20
"""Size of the block that `freed_memory_returns` allocates: well above what other threads do meanwhile."""
_largest_restarted = 0  # largest peak that `restart_peak_rss` has ended, in bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class HostUser:
    """A process and the host memory that it holds: an offloaded optimizer, a data loader's worker, another job."""

    pid: int
    command: str
    """First 15 characters of the program's name."""
    held_bytes: int
    """Resident, without pages of files, which the kernel takes back; shared memory counts in each process."""
    locked_bytes: int
    """Part of these that is locked or pinned by the kernel's accounts, in which CUDA's pinned memory is not."""


def largest_host_users(most: int = 3, *, least_bytes: int = 1 << 30, root: Path = Path("/proc")) -> list[HostUser]:
    """Returns the processes that hold most host memory, largest first: at most `most`, each with `least_bytes` or more."""
    found = (user for user in _host_users(root) if user.held_bytes >= least_bytes)
    return heapq.nlargest(most, found, key=operator.attrgetter("held_bytes"))


def _host_users(root: Path) -> Iterator[HostUser]:
    for status in root.glob("[0-9]*/status"):
        try:
            lines = dict(line.split(":", 1) for line in status.read_text(errors="replace").splitlines() if ":" in line)
        except OSError:  # it has ended
            continue
        nbytes = {name: int(text.split()[0]) << 10 for name, text in lines.items() if text.endswith(" kB")}
        yield HostUser(
            pid=int(status.parent.name),
            command=lines.get("Name", "?").strip(),
            held_bytes=nbytes.get("RssAnon", 0) + nbytes.get("RssShmem", 0),
            locked_bytes=nbytes.get("VmLck", 0) + nbytes.get("VmPin", 0),
        )


def peak_rss_bytes() -> int:
    """Returns the peak resident set size since `restart_peak_rss`, or since the process began.

    On Linux VmHWM, which counts this program only; the value of getrusage includes the process that started it.
    """
    peak = _status("VmHWM:")
    if peak is not None:
        return peak
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak << 10  # macOS counts bytes, others KiB


def run_peak_rss_bytes() -> int:
    """Returns the peak resident set size since the process began, whether or not it was restarted."""
    return max(_largest_restarted, peak_rss_bytes())


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


def restart_peak_rss() -> bool:
    """Sets the peak resident set size to the current one; False where the system cannot, and the peak is the run's."""
    global _largest_restarted
    _largest_restarted = run_peak_rss_bytes()
    try:
        with open("/proc/self/clear_refs", "w", encoding="ascii") as control:
            control.write("5")  # proc(5)
    except OSError:
        return False
    return True


def return_freed_memory() -> bool:
    """Makes free() of tensors return their pages to the system from now on, and returns what is free now.

    Holds for the whole process. Later allocations of tensors map fresh pages, which took at most 6 % of the processor
    time of small training steps. What was freed before leaves holes in the heap, which are filled first and keep their
    pages when they are freed again; `trim_heap` takes them.

    Returns:
        False where the C library is not glibc, and nothing changes.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    mallopt.argtypes = [ctypes.c_int, ctypes.c_int]
    taken = [mallopt(threshold, _MMAP_THRESHOLD_BYTES) for threshold in (_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD)]
    return trim_heap() and all(taken)


def trim_heap() -> bool:
    """Returns the pages of the heap that are free now, those below blocks in use too; False where it is not glibc's."""
    trim = _malloc_trim()
    if trim is None:
        return False
    trim(0)
    return True


@functools.cache
def _malloc_trim() -> Callable[[int], int] | None:
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):
        return None
    trim.argtypes = [ctypes.c_size_t]
    return trim


def freed_memory_returns() -> bool:
    """Measures whether a freed block leaves the resident set once the heap is trimmed; other mallocs may keep it."""
    try:
        library = ctypes.CDLL(None)
        malloc, free = library.malloc, library.free
    except (OSError, AttributeError):
        return False
    malloc.restype, malloc.argtypes, free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
    block = malloc(_PROBE_BYTES)
    if not block:
        return False
    ctypes.memset(block, 1, _PROBE_BYTES)
    before = rss_bytes()
    free(block)
    trim_heap()
    return before - rss_bytes() > _PROBE_BYTES // 2
