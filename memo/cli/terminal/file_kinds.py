"""Kinds of files of memo that people give to a command, told apart by the format that they name.

Commands call `require_kind` before their reader opens a file, so that a file of another kind is refused with the command
that reads it. What is not recognised is left to the reader, whose message says where the file breaks its format.
"""

from __future__ import annotations

import enum
import os
import re
import stat
import zlib
from pathlib import Path

from memo.cli.terminal.output_files import display_name
from memo.errors import MemoError
from memo.mip import STDIN

_HEAD_NBYTES = 8192
_FORMAT = re.compile(rb'\s*\{\s*"format"\s*:\s*"(memo-[a-z-]+)"')
_PICKLE = re.compile(rb"\x80[\x02-\x05]")


class FileKind(enum.Enum):
    """A file's format, its description, and what reads it."""

    TRACE = "memo-trace", "a trace", "memo trace html"
    ACTIVATION_PLAN = "memo-activation-plan", "an activation plan", "memo show, memo check or memo simulate"
    ADDRESS_PLAN = "memo-address-plan", "an address plan", "memo show or memo check"
    BUFFERS = "memo-address-problem", "a list of buffers with lifetimes", "memo pack"
    PROFILE = "memo-profile", "a profile of a step", "memo plan --profile"
    HARDWARE = "memo-hardware", "a description of a machine", "memo plan --gpu or memo simulate --hardware"
    CLUSTER = "memo-cluster", "a description of a cluster", "memo plan --cluster"
    MACHINE_REPORT = "", "a report of memo doctor --json", "memo plan --doctor"
    MODEL_CONFIG = "", "a model's configuration", "memo plan --model"
    SNAPSHOT = "", "a pickle, as memory snapshots of PyTorch are", "memo explain-oom or memo pack"

    def __init__(self, tag: str, words: str, reader: str) -> None:
        self.tag, self.words, self.reader = tag, words, reader


def kind_of(path: str | Path) -> FileKind | None:
    """Kind of a file by its first bytes, unpacked where it is a .gz; None if it is not known or cannot be read."""
    try:
        if str(path) == STDIN or not stat.S_ISREG(os.stat(path).st_mode):
            return None  # a pipe gives its bytes once
        with open(path, "rb") as file:
            head = file.read(_HEAD_NBYTES)
        if head.startswith(b"\x1f\x8b"):
            head = zlib.decompressobj(wbits=31).decompress(head, _HEAD_NBYTES)
    except (OSError, ValueError, zlib.error):
        return None
    if _PICKLE.match(head):
        return FileKind.SNAPSHOT
    named = _FORMAT.match(head)
    return next((kind for kind in FileKind if named and kind.tag == named[1].decode()), None)


def require_kind(path: str | Path, *kinds: FileKind) -> None:
    """Refuses a file of a known kind that is none of `kinds`.

    Raises:
        MemoError: names the file, its kind and the command that reads it.
    """
    found = kind_of(path)
    if found is not None and found not in kinds:
        wanted = " or ".join(kind.words for kind in kinds)
        raise MemoError(f"{display_name(path)} is {found.words}, not {wanted}; use {found.reader}")
