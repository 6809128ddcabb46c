"""Kinds of files that people give to a command, told apart by their first bytes.

Commands call `require_kind` before their reader opens a file, so that a file of another known kind is refused with the
command that reads it. What is not recognised is left to the reader, whose message says where the file breaks its format.
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


class FileKind(enum.Enum):
    """What a file is, and what reads it."""

    TRACE = "a trace", "memo trace html"
    ACTIVATION_PLAN = "an activation plan", "memo show, memo check or memo simulate"
    ADDRESS_PLAN = "an address plan", "memo show, memo check or memo trace html --plan"
    BUFFERS = "a list of buffers with lifetimes", "memo pack"
    PROFILE = "a profile of a step", "memo plan --profile"
    HARDWARE = "a description of a machine", "memo plan --gpu or memo simulate --hardware"
    CLUSTER = "a description of a cluster", "memo plan --cluster"
    MACHINE_REPORT = "a report of memo doctor --json", "memo plan --doctor"
    CHECKPOINT = "a checkpoint", "memo train --resume"
    METRICS = "a metrics file of memo train", None
    STATISTICS = "a report of memo trace stats --json", None
    MODEL_CONFIG = "a model's configuration", "memo plan --model or memo explain --model"
    CHROME_TRACE = "a Chrome trace", "Perfetto, ui.perfetto.dev"
    PAGE = "an HTML page", "a browser"
    PICTURE = "a picture", "an image viewer"
    SNAPSHOT = "a pickle, as memory snapshots of PyTorch are", "memo explain-oom or memo pack"
    ARCHIVE = "an archive, as weights of PyTorch are", None
    BINARY = "a binary file", None
    DIRECTORY = "a directory", None
    EMPTY = "empty", None

    def __init__(self, words: str, reader: str | None) -> None:
        self.words = words
        self.reader = reader


def kind_of(path: str | Path) -> FileKind | None:
    """Kind of a file by its first bytes, unpacked where it is a .gz; None if it is not known or cannot be read."""
    if str(path) == STDIN:
        return None
    try:
        if os.path.isdir(path):
            return FileKind.CHECKPOINT if (Path(path) / "meta.json").is_file() else FileKind.DIRECTORY
        if not stat.S_ISREG(os.stat(path).st_mode):
            return None  # a pipe gives its bytes once
        with open(path, "rb") as file:
            return _kind(file.read(_HEAD_NBYTES))
    except (OSError, ValueError):
        return None


def require_kind(path: str | Path, *kinds: FileKind) -> None:
    """Refuses a file of a known kind that is none of `kinds`.

    Raises:
        MemoError: names the file, its kind and the command that reads it.
    """
    found = kind_of(path)
    if found is None or found in kinds:
        return
    wanted = " or ".join(kind.words for kind in kinds)
    if found.reader is None or not found.reader.startswith("memo"):
        raise MemoError(f"{display_name(path)} is {found.words}; {wanted} is needed")
    raise MemoError(f"{display_name(path)} is {found.words}, not {wanted}; use {found.reader}")


_FORMATS = {
    "memo-trace": FileKind.TRACE,
    "memo-activation-plan": FileKind.ACTIVATION_PLAN,
    "memo-address-plan": FileKind.ADDRESS_PLAN,
    "memo-address-problem": FileKind.BUFFERS,
    "memo-profile": FileKind.PROFILE,
    "memo-hardware": FileKind.HARDWARE,
    "memo-cluster": FileKind.CLUSTER,
    "memo-checkpoint": FileKind.CHECKPOINT,
    "memo-trace-stats": FileKind.STATISTICS,
}
_FORMAT = re.compile(r'^\s*\{\s*"format"\s*:\s*"(memo-[a-z-]+)"')
_KEYS = (  # of JSON without a format, by a key near its beginning
    (re.compile(r'"(traceEvents|displayTimeUnit)"'), FileKind.CHROME_TRACE),
    (re.compile(r'^\s*\{\s*"step"\s*:.*"loss"\s*:', re.DOTALL), FileKind.METRICS),
    (re.compile(r'"(model_type|architectures)"\s*:'), FileKind.MODEL_CONFIG),
    (re.compile(r'"(memory_available_bytes|memlock_limit_bytes|gpu_driver_version)"'), FileKind.MACHINE_REPORT),
)
_MAGIC = {
    b"\x89PNG": FileKind.PICTURE,
    b"\xff\xd8\xff": FileKind.PICTURE,
    b"%PDF": FileKind.PICTURE,
    b"PK\x03\x04": FileKind.ARCHIVE,
}
_PICKLE = re.compile(rb"\x80[\x02-\x05]")


def _kind(head: bytes) -> FileKind | None:
    if head.startswith(b"\x1f\x8b"):
        try:
            head = zlib.decompressobj(wbits=31).decompress(head, _HEAD_NBYTES)
        except zlib.error:
            return FileKind.BINARY
    if not head.strip():
        return FileKind.EMPTY
    for magic, kind in _MAGIC.items():
        if head.startswith(magic):
            return kind
    if _PICKLE.match(head):
        return FileKind.SNAPSHOT
    if b"\0" in head:
        return FileKind.BINARY
    return _kind_of_text(head.decode("utf-8-sig", errors="replace"))


def _kind_of_text(text: str) -> FileKind | None:
    named = _FORMAT.match(text)
    if named is not None:
        return _FORMATS.get(named[1])
    start = text.lstrip()[:200].lower()
    if start.startswith("{"):
        return next((kind for keys, kind in _KEYS if keys.search(text)), None)
    if start.startswith(("<!doctype html", "<html")):
        return FileKind.PAGE
    if start.startswith("<svg") or (start.startswith("<?xml") and "<svg" in text):
        return FileKind.PICTURE
    if re.match(r"(id|lower|upper|size)(,(id|lower|upper|size))+", start):
        return FileKind.BUFFERS
    return None
