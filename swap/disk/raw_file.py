"""Anonymous scratch file of one directory. Every raw disk operation goes through this class.

The file has no name (O_TMPFILE, or created exclusively and unlinked at once): the kernel frees it however the process
ends, and no other process can open it. It is opened O_DIRECT where the file system allows: the page cache would cost a
copy, and memory outside the budgets. Tests substitute a file with injected faults.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import stat
import uuid
from pathlib import Path

from memo.errors import ScratchFull, ScratchUnusable
from memo.units import format_bytes
from memo.warn_user import warn_user

BLOCK_ALIGN = 4096  # of file offsets and lengths, in bytes; a multiple of every logical block size in use

# errno of a file system that is full, over quota, or at RLIMIT_FSIZE.
NO_SPACE = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_NO_TMPFILE = frozenset({errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT})
_NO_FALLOCATE = frozenset({errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS})


def error_name(error: OSError) -> str:
    """Formats an errno with its text: `ENOSPC (No space left on device)`."""
    limit = "; ulimit -f limits it" if error.errno == errno.EFBIG else ""
    return f"{errno.errorcode.get(error.errno or 0, 'error')} ({error.strerror or error}{limit})"


class RawFile:
    """Unnamed file of mode 0600 in `directory`.

    Raises:
        ScratchUnusable: The directory is missing, not a directory, not writable, or world-writable without sticky bit.
        ScratchFull: Not even one block can be written. Either way nothing is left open.
    """

    fd = -1

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.fd, self.direct = _open_anonymous(directory)
        try:
            self.memory_align = self._probe_memory_align()
        except BaseException:
            self.close()
            raise
        if not self.direct:
            warn_user(
                f"{directory}: the file system has no O_DIRECT; scratch goes through the page cache, which is slower"
            )

    def pwrite(self, data: memoryview, offset: int) -> int:
        """Writes at a file offset; returns the bytes written, possibly fewer than `data` has."""
        return os.pwrite(self.fd, data, offset)

    def pread(self, data: memoryview, offset: int) -> int:
        """Reads into `data` from a file offset; returns the bytes read, 0 at the end of the file."""
        return os.preadv(self.fd, [data], offset)

    def fallocate(self, nbytes: int) -> None:
        """Extends the file to `nbytes` and reserves its blocks, so that later writes cannot fail with a full disk.

        Where the file system cannot reserve blocks, the only check is the caller's comparison with `free_bytes()`.
        """
        try:
            os.posix_fallocate(self.fd, 0, nbytes)
        except OSError as error:
            if error.errno not in _NO_FALLOCATE:
                raise
            os.ftruncate(self.fd, nbytes)
            warn_user(
                f"{self.directory}: the file system cannot reserve blocks; a full disk is detected only by a write"
            )

    def free_bytes(self) -> int:
        """Returns the bytes that this process may still allocate on the file system."""
        volume = os.fstatvfs(self.fd)
        return volume.f_bavail * volume.f_frsize

    def close(self) -> None:
        """Closes the file; the kernel frees its blocks. Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        # For files that no store closed: a constructor that failed half-way, a store dropped on its own I/O thread.
        self.close()

    def _probe_memory_align(self) -> int:
        """Smallest buffer alignment that O_DIRECT accepts, by trial: only statx of newer systems reports it."""
        if not self.direct:
            return 1
        with mmap.mmap(-1, 2 * BLOCK_ALIGN) as pages, memoryview(pages) as view:
            for align in (512, BLOCK_ALIGN):
                try:
                    os.pwrite(self.fd, view[align : align + BLOCK_ALIGN], 0)
                    return align
                except OSError as error:
                    if error.errno in NO_SPACE:
                        raise ScratchFull(
                            f"{self.directory}: not even {BLOCK_ALIGN} bytes of scratch can be written:"
                            f" {error_name(error)}; {format_bytes(self.free_bytes())} are free"
                        ) from error
                    if error.errno != errno.EINVAL:
                        raise ScratchUnusable(f"{self.directory}: cannot write: {error_name(error)}") from error
        fcntl.fcntl(self.fd, fcntl.F_SETFL, fcntl.fcntl(self.fd, fcntl.F_GETFL) & ~os.O_DIRECT)
        self.direct = False
        return 1


def _open_anonymous(directory: Path) -> tuple[int, bool]:
    """Opens the file; returns its descriptor and whether it is O_DIRECT."""
    try:
        parent = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise ScratchUnusable(
            f"scratch directory {directory}: {error_name(error)}; give an existing directory that you can write to"
        ) from error
    try:
        _refuse_unsafe(directory, parent)
        for direct in (os.O_DIRECT, 0):
            try:
                return _create(directory, parent, direct), bool(direct)
            except OSError as error:
                if not (direct and error.errno == errno.EINVAL):
                    raise ScratchUnusable(
                        f"scratch directory {directory}: cannot create a file: {error_name(error)}"
                    ) from error
        raise AssertionError("unreachable: the buffered attempt returns or raises")
    finally:
        os.close(parent)


def _refuse_unsafe(directory: Path, parent: int) -> None:
    mode = os.fstat(parent).st_mode
    if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
        raise ScratchUnusable(
            f"scratch directory {directory} is world-writable without the sticky bit: any user could remove its files;"
            " use a directory of your own, or chmod +t"
        )


def _create(directory: Path, parent: int, direct: int) -> int:
    flags = os.O_RDWR | os.O_CLOEXEC | direct
    try:
        return os.open(directory, flags | os.O_TMPFILE, 0o600)
    except OSError as error:
        if error.errno not in _NO_TMPFILE:
            raise
    name = f".memo-{uuid.uuid4().hex}"
    fd = os.open(name, flags | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600, dir_fd=parent)
    try:
        os.unlink(name, dir_fd=parent)
    except BaseException:
        with contextlib.suppress(OSError):
            os.close(fd)
        raise
    return fd
