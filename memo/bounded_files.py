"""Reading of files that anyone may have written: bounded bytes of a regular file, UTF-8 text, strict JSON.

Owns what all readers refuse alike; the formats belong to the readers, which turn `Refused` into an error of their own that
names the file. Invariant: a file costs at most a fixed multiple of its size, or of a limit, in memory and time. A device
or a pipe that nobody writes to is refused at once.
"""

from __future__ import annotations

import collections
import gzip
import io
import json
import math
import os
import stat
from typing import Any, BinaryIO, NoReturn

MAX_FILE_NBYTES = 32 << 20
MAX_INTEGER = 2**63 - 1
_LONGEST_NAME = 255  # bytes, of Linux
MAX_DEPTH = 32
"""Nesting of a free-form value; Python's own parser fails near 1000."""


class Refused(ValueError):
    """Content that no reader takes; the message says why in a few words, without the file's name."""


def shown_name(path: str | os.PathLike[str]) -> str:
    """File name for an error message: on one line, without control characters."""
    return repr(os.fspath(path))[1:-1]


def open_file(path: str | os.PathLike[str], *, pipes: bool = False) -> BinaryIO:
    """Opens a regular file for reading, and never waits for it.

    Args:
        path: the file.
        pipes: whether a pipe that has a writer, such as a shell's `<(...)`, is taken as well.

    Raises:
        Refused: another kind of file, or no name that a file can have.
        OSError: it cannot be opened.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError:  # a null character
        raise Refused("no name of a file") from None
    kind = os.fstat(descriptor).st_mode
    if not (stat.S_ISREG(kind) or (pipes and stat.S_ISFIFO(kind))):
        os.close(descriptor)
        raise Refused("not a regular file")
    os.set_blocking(descriptor, True)
    return os.fdopen(descriptor, "rb")


class _Counted:
    """A file whose bytes are counted as they are read, since a pipe does not tell where it is."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.read_nbytes = 0

    def read(self, size: int = -1, /) -> bytes:
        content = self._file.read(size)
        self.read_nbytes += len(content)
        return content


class Unpacked(io.RawIOBase):
    """Unpacked bytes of a .gz file, refused where they exceed a multiple of the packed ones. Owns the file.

    Args:
        packed: the file.
        most_ratio: largest ratio of unpacked to packed bytes beyond the first MiB.
    """

    def __init__(self, packed: BinaryIO, *, most_ratio: int) -> None:
        self._packed = packed
        self._counted = _Counted(packed)
        readable: Any = self._counted  # reads alone, which is all that GzipFile does here
        self._stream = gzip.GzipFile(fileobj=readable, mode="rb")
        self._most_ratio = most_ratio
        self._total = 0

    def readable(self) -> bool:
        """True."""
        return True

    def readinto(self, buffer: Any, /) -> int:
        """Unpacks the next bytes.

        Raises:
            Refused: there are too many.
            OSError, EOFError, zlib.error: the file is damaged, or ends too early.
        """
        content = self._stream.read(len(buffer))
        buffer[: len(content)] = content
        self._total += len(content)
        if self._total > max(1 << 20, self._counted.read_nbytes * self._most_ratio):
            raise Refused(f"unpacks to over {self._most_ratio} times its size")
        return len(content)

    def close(self) -> None:
        """Closes the file. Idempotent."""
        if not self.closed:
            self._stream.close()
            self._packed.close()
        super().close()


def is_file_name(name: str) -> bool:
    """True for a name within a folder, False for a path that leads elsewhere."""
    nbytes = len(name.encode(errors="surrogatepass"))
    return name not in (".", "..") and 0 < nbytes <= _LONGEST_NAME and not {"/", "\0"} & set(name)


def read_bytes(path: str | os.PathLike[str], *, most: int = MAX_FILE_NBYTES) -> bytes:
    """Reads a regular file of at most `most` bytes.

    Raises:
        Refused: as `open_file`, or the file is larger.
        OSError: it cannot be read.
    """
    with open_file(path) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise Refused(f"larger than {most >> 20} MiB")
    return content


def text_of(content: bytes) -> str:
    """Decodes UTF-8 text, with or without a byte order mark.

    Raises:
        Refused: it is empty, or not UTF-8.
    """
    if not content.strip():
        raise Refused("is empty")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Refused(f"not UTF-8 text (byte {error.start})") from None


def parse_json(text: str, *, constants: bool = False) -> Any:
    """Parses a JSON document; `constants` allows NaN and Infinity, as Python's own encoder writes them.

    Raises:
        Refused: not JSON, a repeated key, NaN, an infinite number, an integer of thousands of digits, or nested too deeply.
    """
    try:
        return (_OF_PYTHON if constants else _DECODER).decode(text)
    except RecursionError:
        raise Refused("nested too deeply") from None
    except Refused:
        raise
    except ValueError as error:  # JSONDecodeError, and integers of over 4300 digits
        reason = error.msg if isinstance(error, json.JSONDecodeError) else "a number is too long"
        raise Refused(f"not JSON ({reason})") from None


def parse_object(text: str, *, constants: bool = False) -> dict[str, Any]:
    """Parses a JSON document whose root is an object.

    Raises:
        Refused: as `parse_json`, or the root is something else.
    """
    value = parse_json(text, constants=constants)
    if not isinstance(value, dict):
        raise Refused("not a JSON object")
    return value


def read_object(path: str | os.PathLike[str], *, constants: bool = False) -> dict[str, Any]:
    """Reads a file whose text is a JSON object of plain values (`require_plain`).

    Raises:
        Refused: as `read_bytes`, `text_of`, `parse_object` and `require_plain`.
        OSError: it cannot be read.
    """
    value = parse_object(text_of(read_bytes(path)), constants=constants)
    require_plain(value)
    return value


def require_plain(value: object, *, depth: int = 0) -> None:
    """Checks a free-form value.

    Raises:
        Refused: it nests deeper than MAX_DEPTH, or holds an integer outside 64 bits.
    """
    if depth > MAX_DEPTH:
        raise Refused("nested too deeply")
    if isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            require_plain(item, depth=depth + 1)
    elif isinstance(value, int) and not -MAX_INTEGER - 1 <= value <= MAX_INTEGER:
        raise Refused("an integer does not fit 64 bits")


def _no_constant(name: str) -> NoReturn:
    raise Refused(f"{name} is not a JSON number")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise Refused(f"the number {text[:40]} is too large")
    return value


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        ((twice, _),) = collections.Counter(key for key, _ in pairs).most_common(1)
        raise Refused(f"key {twice[:40]!a} stands twice")
    return found


_DECODER = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant, parse_float=_finite)
_OF_PYTHON = json.JSONDecoder(object_pairs_hook=_unique, parse_float=_finite)
