"""The standard streams as a command may find them: closed, full, read by nobody, or of few characters.

Owns what is done about each, so that no subcommand has to ask. Invariant: whatever happens to standard output, a command
ends with an exit code and at most one line on standard error, never in a traceback.
"""

from __future__ import annotations

import errno
import io
import os
import sys

__all__ = ["abandon_stdout", "is_full", "prepare"]


def prepare() -> None:
    """Opens the streams that the caller closed, and has characters that a terminal lacks written as question marks."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = getattr(sys, name)
        if stream is None:  # `memo ... >&-`: the next file to be opened would get its number
            setattr(sys, name, open(os.devnull, "w" if number else "r"))  # noqa: SIM115  # until the process ends
        elif number and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def abandon_stdout() -> None:
    """What is still buffered goes nowhere, so that the interpreter does not fail on it at its end."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, sys.stdout.fileno())
    os.close(null)


def is_full(error: OSError) -> bool:
    """Whether the error is of a disk that has no room, or allows no larger file."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
