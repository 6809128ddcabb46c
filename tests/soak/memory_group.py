"""A memory cgroup of one process's own, whose limit a soak lowers for some steps.

It is a child of the group that the process is in, so no limit above it is escaped. Version 1 of cgroups has one limit, at
which the kernel reclaims page cache and, where that is not enough, kills; version 2 has `memory.max` for that.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

_MOUNTS = Path("/sys/fs/cgroup")


class MemoryGroup:
    """A group that holds this process; what it allocated before it joined stays counted elsewhere.

    Raises:
        OSError: no group can be made here, or none with a limit.
    """

    def __init__(self) -> None:
        folder, self._version = _folder_of(os.getpid())
        with contextlib.suppress(OSError):  # where processes are in the parent, version 2 refuses
            if self._version == 2 and "memory" not in (folder.parent / "cgroup.subtree_control").read_text().split():
                (folder.parent / "cgroup.subtree_control").write_text("+memory")
        folder.mkdir()
        try:
            self._limit = folder / ("memory.limit_in_bytes" if self._version == 1 else "memory.max")
            self._limit.read_text()
            (folder / "cgroup.procs").write_text(str(os.getpid()))
        except OSError:
            folder.rmdir()
            raise
        self._folder = folder

    def held_bytes(self) -> int:
        """Bytes that cannot be reclaimed: all but the pages of files on a disk."""
        usage, prefix, files = ("usage_in_bytes", "total_", "cache") if self._version == 1 else ("current", "", "file")
        used = int((self._folder / f"memory.{usage}").read_text())
        return used - self._stat(f"{prefix}{files}") + self._stat(f"{prefix}shmem")

    def limit(self, nbytes: int) -> None:
        """Sets the limit; page cache above it is reclaimed at once."""
        self._limit.write_text(str(nbytes))

    def unlimit(self) -> None:
        """Lifts the limit."""
        self._limit.write_text("-1" if self._version == 1 else "max")

    def times_at_limit(self) -> int:
        """How often an allocation has met the limit since the group was made."""
        if self._version == 1:
            return int((self._folder / "memory.failcnt").read_text())
        events = dict(line.split() for line in (self._folder / "memory.events").read_text().splitlines())
        return int(events["max"])

    def _stat(self, name: str) -> int:
        lines = (self._folder / "memory.stat").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith(f"{name} "))


def remove_group_of(pid: int) -> None:
    """Removes the group of a process that has ended, seen from the group that it began in."""
    with contextlib.suppress(OSError):
        _folder_of(pid)[0].rmdir()


def _folder_of(pid: int) -> tuple[Path, int]:
    """Folder for the group of a process below this process's group, and the version of cgroups.

    Raises:
        OSError: there is no controller of memory.
    """
    for mount, path, version in _memory_groups():
        if (mount / path).is_dir():
            return mount / path / f"memo-soak-{pid}", version
    raise FileNotFoundError("there is no memory controller")


def _memory_groups() -> Iterator[tuple[Path, str, int]]:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            yield _MOUNTS / "memory", path.strip("/"), 1
        elif controllers == "" and "memory" in _controllers(_MOUNTS / path.strip("/")):
            yield _MOUNTS, path.strip("/"), 2


def _controllers(folder: Path) -> list[str]:
    try:
        return (folder / "cgroup.controllers").read_text().split()
    except OSError:
        return []
