"""Token file: a training set as one memory-mapped file of tokens, built once and cached.

Owns the cache: file format, directory and file name, which is a hash of everything the tokens depend on (files with size and
time, field, tokenizer, format version). A file is written under a temporary name and renamed when it is complete, so
concurrent builders at worst both do the work. A truncated file is recognised by its length and built again.

    header (64 bytes): magic, bytes per token, vocabulary, end of document, tokens, documents | tokens ...
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import os
import struct
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt

from memo.errors import DataError
from memo.gpt.data.documents import find_files, read_documents, read_packages
from memo.gpt.data.tokenizer import Tokenizer, load_tokenizer

MAGIC = b"MEMOTOK\x01"
HEADER = struct.Struct("<8sIIQQQ24x")
DOCUMENTS_PER_ENCODE = 64
TOKENS_PER_SCAN = 1 << 24
SUFFIX, UNFINISHED = ".tokens", ".unfinished"
# An unfinished file that is not written to for a day has lost its writer (a kill -9).
ABANDONED_S = 86_400.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TokenFile:
    """Tokens of a training set, every document followed by `end_of_document`."""

    path: Path
    tokens: npt.NDArray[np.uint16] | npt.NDArray[np.uint32]
    """Memory-mapped and read-only."""
    vocab_size: int
    end_of_document: int
    documents: int

    def __len__(self) -> int:
        return len(self.tokens)

    def ends(self) -> npt.NDArray[np.int64]:
        """Positions of the `end_of_document` tokens, ascending; reads all tokens once, in parts."""
        parts = (
            first + np.flatnonzero(self.tokens[first : first + TOKENS_PER_SCAN] == self.end_of_document)
            for first in range(0, len(self.tokens), TOKENS_PER_SCAN)
        )
        return np.concatenate([np.zeros(0, np.int64), *parts])


def open_tokens(
    data: Sequence[str] | None,
    *,
    tokenizer: str | None = None,
    field: str = "text",
    cache_dir: Path | None = None,
    packages: bool = False,
) -> TokenFile:
    """Opens the tokens of `data` from the cache; reads, encodes and caches them first where needed.

    Args:
        data: text files, directories, globs, JSON lines (also `.gz`) or Parquet files; None is the source of the running
            Python's standard library, one document per file.
        tokenizer: a Hugging Face tokenizer.json; None is one token per byte.
        field: key or column of the text in JSON lines and Parquet.
        cache_dir: a writable directory; None is the user's cache directory, or a private one under the system's temporary
            directory where that cannot be written.
        packages: with the standard library, one document per package; some have more than a million bytes.

    Raises:
        DataError: nothing to read, something unreadable, or no room for the cache. No file is left behind.
    """
    files = find_files(data)
    encoder = load_tokenizer(tokenizer)
    folder = _cache_folder(cache_dir)
    by_package = packages and data is None
    path = folder / f"{_cache_key(files, encoder, field, by_package)}{SUFFIX}"
    cached = _open_cached(path)
    if cached is not None:
        return cached
    try:
        _remove_abandoned(folder)
        with _replacing(path) as out:
            _write(out, read_packages(files) if by_package else read_documents(files, field=field), encoder)
    except OSError as error:
        raise DataError(f"cannot write the token cache in {folder}: {error.strerror or error}") from error
    built = _open_cached(path)
    if built is None:
        raise DataError(f"the token cache {path} changed while it was being opened; run again")
    return built


def default_cache_dir() -> Path:
    """Directory `memo/tokens` in the user's cache directory, by the XDG convention."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The convention ignores a relative path.
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "memo" / "tokens"


def _cache_folder(cache_dir: Path | None) -> Path:
    try:
        return _create_writable(cache_dir or default_cache_dir())
    except (OSError, RuntimeError) as error:  # RuntimeError: a user without a home directory
        if cache_dir is not None:
            raise DataError(
                f"cannot write the token cache in {cache_dir}: {getattr(error, 'strerror', error)}"
            ) from error
    return _private_temporary_folder()


def _create_writable(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=folder).close()
    return folder


def _private_temporary_folder() -> Path:
    """Directory under the system's temporary one that only this user can write to."""
    folder = Path(tempfile.gettempdir()) / f"memo-tokens-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.lstat()
        if not folder.is_symlink() and status.st_uid == os.getuid() and not status.st_mode & 0o022:
            return _create_writable(folder)
        reason = "it belongs to someone else"
    except OSError as error:
        reason = error.strerror or str(error)
    raise DataError(f"cannot write the token cache in {folder}: {reason}; name a directory with XDG_CACHE_HOME")


def _cache_key(files: Iterable[Path], tokenizer: Tokenizer, field: str, by_package: bool) -> str:
    digest = hashlib.sha256(MAGIC)
    for part in (tokenizer.identity, field, *["by package"] * by_package):
        digest.update(part.encode("utf-8", "surrogateescape") + b"\0")
    for file in files:
        try:
            status = file.stat()
        except OSError as error:
            raise DataError(f"cannot read {file}: {error.strerror or error}") from error
        line = f"{os.path.abspath(file)}\0{status.st_size}\0{status.st_mtime_ns}\n"
        digest.update(line.encode("utf-8", "surrogateescape"))
    return digest.hexdigest()[:32]


def _open_cached(path: Path) -> TokenFile | None:
    """Cached tokens, or None without a complete file."""
    try:
        with path.open("rb") as file:
            head = file.read(HEADER.size)
            nbytes = os.fstat(file.fileno()).st_size
            if len(head) < HEADER.size:
                return None
            magic, itemsize, vocab_size, end, count, documents = HEADER.unpack(head)
            if magic != MAGIC or itemsize not in (2, 4) or not count or nbytes != HEADER.size + count * itemsize:
                return None
            dtype = np.dtype(f"<u{itemsize}")
            tokens = np.memmap(file, dtype=dtype, mode="r", offset=HEADER.size, shape=(count,))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise DataError(f"cannot read the token cache {path}: {error.strerror or error}") from error
    return TokenFile(path=path, tokens=tokens, vocab_size=vocab_size, end_of_document=end, documents=documents)


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[IO[bytes]]:
    """Opens a temporary file that replaces `path` when the block ends, and is removed when the block raises."""
    handle, name = tempfile.mkstemp(prefix=f"{path.stem}.", suffix=UNFINISHED, dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as out:
            yield out
            out.flush()
            os.fsync(out.fileno())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)
        raise


def _write(out: IO[bytes], documents: Iterable[str], tokenizer: Tokenizer) -> None:
    itemsize = 2 if tokenizer.vocab_size <= 1 << 16 else 4
    dtype = np.dtype(f"<u{itemsize}")
    end = np.array([tokenizer.end_of_document], dtype=dtype).tobytes()
    out.write(bytes(HEADER.size))
    tokens = written = 0
    source = iter(documents)
    while texts := list(itertools.islice(source, DOCUMENTS_PER_ENCODE)):
        for encoded in tokenizer.encode(texts):
            out.write(encoded.astype(dtype).tobytes())
            out.write(end)
            tokens += len(encoded) + 1
            written += 1
    if not written:
        raise DataError("the data holds no text; name other files with --data")
    out.seek(0)
    vocabulary = (tokenizer.vocab_size, tokenizer.end_of_document)
    out.write(HEADER.pack(MAGIC, itemsize, *vocabulary, tokens, written))


def _remove_abandoned(folder: Path) -> None:
    for file in folder.glob(f"*{UNFINISHED}"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - file.stat().st_mtime > ABANDONED_S:
                file.unlink()
