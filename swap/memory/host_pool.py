"""One host budget for several jobs of a node: byte i of it belongs to whoever has locked byte i of a file.

The file's content is neither read nor written, and may be empty. Locks are the kernel's (open file description locks): they
end with the process, however it ends, so a killed job leaves nothing behind, and no record of who holds what can be
stale or torn. Each manager opens the file anew, and so two of one process do not share a lock.

    job A  host="64GiB"   |#####################|        |####|                |
    job B  host="64GiB"   |                     |########|    |                |
                          0                                                 64 GiB
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
from typing import TYPE_CHECKING

from memo.errors import HostPoolUnusable
from memo.forks import call_in_child
from memo.units import format_bytes
from memo.warn_user import warn_user

if TYPE_CHECKING:
    from collections.abc import Iterator

_SET, _GET = getattr(fcntl, "F_OFD_SETLK", None), getattr(fcntl, "F_OFD_GETLK", None)  # of Linux alone
_FLOCK = struct.Struct("hhqqi4x")  # struct flock of 64-bit Linux: type, whence, start, length (0: to the end), pid


class HostPool:
    """One manager's part of a host budget that all jobs which name one file share. Not thread-safe, except `close`.

    Args:
        path: file on this node, made if it is missing; each job needs permission to write it.
        nbytes: the budget of all jobs together. Where jobs name different ones, each keeps within its own.

    Raises:
        HostPoolUnusable: the file cannot be opened for writing or locked.
    """

    def __init__(self, path: str | os.PathLike[str], nbytes: int) -> None:
        self.path = os.fspath(path)
        self.nbytes = nbytes
        self._held: list[tuple[int, int]] = []
        """Locked ranges, in the order they were taken."""
        self._warned = False
        self._fd = -1
        try:
            self._fd = _opened(self.path)
            self._call(_GET, fcntl.F_WRLCK, 0, nbytes)
        except OSError as error:
            self.close()
            raise HostPoolUnusable(
                f"host_pool={self.path!r}: {error.strerror}; give a file on this node that each of the jobs may write, "
                f"such as /dev/shm/memo-host"
            ) from None
        # A forked process, such as a data loader's worker, would hold its parent's locks when that has ended.
        call_in_child(self, HostPool.close)

    @property
    def held(self) -> int:
        """Bytes of the budget that this manager holds."""
        return sum(stop - start for start, stop in self._held)

    @property
    def free(self) -> int:
        """Bytes of the budget that no manager holds now."""
        return sum(stop - start for start, stop in self._gaps())

    def resize(self, nbytes: int) -> bool:
        """Takes or gives back bytes, so that `nbytes` are held; False where others leave too few, and nothing changes."""
        missing = nbytes - self.held
        if missing <= 0:
            self._give_back(-missing)
            return True
        if not self._file_exists():
            return False
        taken = 0
        while taken < missing:
            gap = next(self._gaps(), None)
            if gap is None:
                self._give_back(taken)
                return False
            start, stop = gap[0], min(gap[1], gap[0] + missing - taken)
            if self._lock(start, stop):  # else another job was faster, and the next gap is looked for
                self._held.append((start, stop))
                taken += stop - start
        return True

    def close(self) -> None:
        """Gives everything back. Idempotent; any thread may call it."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)
        self._held = []

    def _file_exists(self) -> bool:
        """False where the file has been removed: a job that makes it anew would not see what is held here."""
        if self._fd < 0 or os.fstat(self._fd).st_nlink:
            return self._fd >= 0
        if not self._warned:
            self._warned = True
            warn_user(
                f"host_pool={self.path!r} was removed: jobs that start now do not see the {format_bytes(self.held)} of host "
                f"memory of this one, which takes no more"
            )
        return False

    def _give_back(self, nbytes: int) -> None:
        while nbytes:
            start, stop = self._held.pop()
            kept = max(start, stop - nbytes)
            if kept > start:
                self._held.append((start, kept))
            self._call(_SET, fcntl.F_UNLCK, kept, stop)
            nbytes -= stop - kept

    def _gaps(self) -> Iterator[tuple[int, int]]:
        """Ranges that nobody has locked, from the lowest on. Locks of one's own do not show as conflicts."""
        below = 0
        for start, stop in [*sorted(self._held), (self.nbytes, self.nbytes)] if self._fd >= 0 else ():
            pending = [(below, min(start, self.nbytes))]
            below = stop
            while pending:
                first, last = pending.pop()
                if first >= last:
                    continue
                conflict = self._conflict(first, last)
                if conflict is None:
                    yield first, last
                else:  # one of the conflicts, not always the lowest
                    pending += [(conflict[1], last), (first, conflict[0])]

    def _conflict(self, start: int, stop: int) -> tuple[int, int] | None:
        kind, _, first, length, _ = self._call(_GET, fcntl.F_WRLCK, start, stop)
        return None if kind == fcntl.F_UNLCK else (first, first + length if length else stop)

    def _lock(self, start: int, stop: int) -> bool:
        try:
            self._call(_SET, fcntl.F_WRLCK, start, stop)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                return False
            raise HostPoolUnusable(f"host_pool={self.path!r}: {error.strerror}") from None
        return True

    def _call(self, command: int | None, kind: int, start: int, stop: int) -> tuple[int, ...]:
        if command is None:
            raise OSError(errno.ENOTSUP, "this system has no locks that belong to an open file")
        request = _FLOCK.pack(kind, os.SEEK_SET, start, stop - start, 0)
        return _FLOCK.unpack(fcntl.fcntl(self._fd, command, request))


def _opened(path: str) -> int:
    """Descriptor of the file, which is made where it is missing."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK
    try:
        # First without O_CREAT, which the kernel refuses for another user's file in a sticky directory.
        fd = os.open(path, flags)
    except FileNotFoundError:
        fd = os.open(path, flags | os.O_CREAT, 0o666)
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        raise OSError(errno.EINVAL, "not a regular file")
    return fd
