"""Files that a command writes: whole or not at all, and never over an existing one without `-f`."""

from __future__ import annotations

import argparse
import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

from memo.errors import OutputExists, TraceError, UsageError
from memo.trace import printable
from memo.units import format_bytes

__all__ = ["file_name", "file_path", "refuse_existing", "replacing", "say_written", "shown"]


def file_name(text: str) -> str:
    """For argparse: a file to write. A shell's empty variable names none, and `-` is not standard output."""
    if text in ("", "-"):
        raise argparse.ArgumentTypeError(f"{text!r} is no name of a file")
    return text


def file_path(text: str) -> Path:
    """`file_name` as a path."""
    return Path(file_name(text))


def shown(path: str | Path) -> str:
    """The file's name as a terminal can be given it."""
    return printable(str(path), limit=200)


def refuse_existing(*paths: str | Path | None, force: bool) -> None:
    """Before the work whose result these files are to hold; None is a file that is not asked for.

    Raises:
        OutputExists: one exists, and `force` is not given. UsageError: one is a directory.
    """
    for path in paths:
        if path is None:
            continue
        if os.path.isdir(path):
            raise UsageError(f"{shown(path)} is a directory; name a file")
        if os.path.lexists(path) and not force:
            raise OutputExists(f"{shown(path)} exists; give -f to overwrite it")


@contextlib.contextmanager
def replacing(path: Path, *, force: bool) -> Iterator[Path]:
    """A sibling to write to, which takes the place of `path` when all went well.

    Raises:
        OutputExists, UsageError: as `refuse_existing`. TraceError: the place cannot be written.
    """
    refuse_existing(path, force=force)
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
        raise TraceError(f"cannot write {shown(path)}: {error.strerror}") from None


def say_written(path: Path) -> None:
    """One line: the file and its size."""
    print(f"Wrote {shown(path)} ({format_bytes(path.stat().st_size)})")


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
