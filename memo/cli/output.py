"""Files that a command writes: whole or not at all, and never over an existing one without `--force`."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from memo.errors import TraceError, UsageError
from memo.trace.words import printable
from memo.units import format_bytes

__all__ = ["replacing", "say_written"]


@contextlib.contextmanager
def replacing(path: Path, *, force: bool) -> Iterator[Path]:
    """A sibling to write to, which takes the place of `path` when all went well.

    Raises:
        UsageError: `path` exists and `force` is not given.
        TraceError: the place cannot be written.
    """
    shown = printable(str(path), limit=200)
    if path.exists() and not force:
        raise UsageError(f"{shown} exists; --force writes over it")
    try:
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".memo-", suffix=path.suffix)
        os.close(descriptor)
        sibling = Path(name)
        try:
            yield sibling
            sibling.chmod(0o666 & ~_umask())
            sibling.replace(path)
        finally:
            sibling.unlink(missing_ok=True)
    except OSError as error:
        raise TraceError(f"cannot write {shown}: {error.strerror}") from None


def say_written(path: Path) -> None:
    """One line: the file and its size."""
    print(f"Wrote {printable(str(path), limit=200)} ({format_bytes(path.stat().st_size)})")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
