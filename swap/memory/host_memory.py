"""Host memory that this process can still take: the kernel's estimate, within the limits of its cgroups.

RLIMIT_MEMLOCK does not matter: a GPU's driver pins pages itself and does not count them there.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_ROOT = Path("/")
_UNLIMITED = 1 << 60
"""Larger limits mean no limit: cgroup v1 writes a number near 2^63."""


def available_host_bytes(root: Path = _ROOT, *, total_before: int | None = None) -> int:
    """Bytes of host memory available without swapping: the kernel's estimate, and no more than any cgroup leaves.

    Some virtual machines and containers are given memory as they use it, and the kernel's total grows. Where it has grown
    the kernel's estimate says little, and only the limits of the cgroups count, if there are any.

    Args:
        root: root of the file system that holds proc and sys.
        total_before: an earlier total to compare with; None: that at the import of this module.
    """
    rooms = list(_cgroup_rooms(root))
    before = _total_at_import if total_before is None else total_before
    if rooms and total_host_bytes(root) > before:
        return min(rooms)
    return min(_meminfo(root).get("MemAvailable", _free_pages()), *rooms, _UNLIMITED)


def total_host_bytes(root: Path = _ROOT) -> int:
    """Returns the physical memory of the machine as the kernel reports it now, whatever the cgroups' limits."""
    return _meminfo(root).get("MemTotal") or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _meminfo(root: Path) -> dict[str, int]:
    """Fields of /proc/meminfo in bytes; empty where the system is not Linux."""
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
    except OSError:
        return {}
    fields = (line.split() for line in lines)
    return {field[0].rstrip(":"): int(field[1]) << 10 for field in fields if field[-1] == "kB"}


def _free_pages() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup_rooms(root: Path) -> Iterator[int]:
    """Bytes that each limited cgroup of this process leaves, for cgroups of both versions."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    mounts = root / "sys/fs/cgroup"
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            for mount in (mounts, mounts / "unified"):
                yield from _rooms(mount, path, ("memory.max", "memory.high"), "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes",)
            yield from _rooms(mounts / "memory", path, names, "memory.usage_in_bytes", "total_inactive_file")


def _rooms(mount: Path, path: str, limits: tuple[str, ...], usage: str, reclaimable: str) -> Iterator[int]:
    """Bytes left in a group and each of its ancestors; a container sees its own group as the mount, and no ancestors."""
    group = Path(path.strip("/"))
    for above in dict.fromkeys((group, *group.parents)):
        directory = mount / above
        limit = min((_number(directory / name) for name in limits), default=_UNLIMITED)
        used = _number(directory / usage)
        if limit < _UNLIMITED and used < _UNLIMITED:
            yield max(0, limit - used + min(used, _stat(directory / "memory.stat", reclaimable)))


def _number(file: Path) -> int:
    try:
        text = file.read_text().strip()
    except OSError:
        return _UNLIMITED
    return _UNLIMITED if text == "max" else int(text)


def _stat(file: Path, name: str) -> int:
    """One field of memory.stat: inactive file pages count as used, but the kernel reclaims them on demand."""
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{name} ")), 0)


_total_at_import = total_host_bytes()
