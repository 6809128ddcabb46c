"""Output files of a command: written completely or not at all, and never over an existing file without `-f`."""

from __future__ import annotations

import argparse
import errno
import os
from pathlib import Path

from memo.errors import MemoError, OutputExists, UsageError
from memo.trace import printable
from memo.units import format_bytes


def file_name(text: str) -> str:
    """Argument type of a file to write; refuses the empty name and `-`, which is not standard output here."""
    if text in ("", "-"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a file name")
    return text


def file_path(text: str) -> Path:
    """Argument type of a file to write, as a Path; see `file_name`."""
    return Path(file_name(text))


def display_name(path: str | Path) -> str:
    """File name without control characters, cut to 200 characters."""
    return printable(str(path), limit=200)


def refuse_existing(*paths: str | Path | None, force: bool) -> None:
    """Checks output files before the work starts.

    Args:
        paths: the files; None is an output that was not requested.
        force: existing files may be overwritten.

    Raises:
        OutputExists: a file exists and `force` is False.
        UsageError: a path is a directory.
        MemoError: its directory does not exist or cannot be written to.
    """
    for path in paths:
        if path is None:
            continue
        if os.path.isdir(path):
            raise UsageError(f"{display_name(path)} is a directory; name a file")
        if os.path.lexists(path) and not force:
            raise OutputExists(f"{display_name(path)} exists; give -f to overwrite it")
        _require_directory(Path(path))


def _require_directory(path: Path) -> None:
    """Checks that a file can be made beside `path`."""
    parent = path.parent
    if not parent.exists():
        reason = errno.ENOENT
    elif not parent.is_dir():
        reason = errno.ENOTDIR
    elif not os.access(parent, os.W_OK | os.X_OK):
        reason = errno.EACCES
    else:
        return
    raise MemoError(f"cannot write {display_name(path)}: {display_name(parent)}: {os.strerror(reason)}")


def print_written(path: str | Path) -> None:
    """Prints the file's name and size."""
    print(f"Wrote {display_name(path)} ({format_bytes(os.stat(path).st_size)})")
