"""Documents of a training set: the files and the texts inside them, in a fixed order.

Owns the reading of text, directories, globs, JSON lines and Parquet. A document is one text; undecodable bytes become
U+FFFD, empty documents are skipped. Unreadable input raises a DataError with the file, the line where there is one, and what
to do. Nothing read here is executed or unpickled.
"""

from __future__ import annotations

import glob
import io
import itertools
import json
import os
import sysconfig
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import BinaryIO

from memo.bounded_files import Refused, Unpacked, open_file
from memo.errors import DataError

TEXT_SUFFIXES = frozenset(
    {".txt", ".text", ".md", ".rst", ".tex", ".csv", ".tsv", ".html", ".htm", ".xml", ".toml", ".yaml", ".yml"}
    | {".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".rs", ".go", ".java", ".js", ".ts", ".sh", ".sql"}
)
JSON_LINES_SUFFIXES = frozenset({".jsonl", ".ndjson"})
PARQUET_SUFFIXES = frozenset({".parquet", ".pq"})

# Installed packages and caches differ from machine to machine; the rest of a Python version is always the same.
NOT_STANDARD = frozenset({"site-packages", "dist-packages", "__pycache__"})

ROWS_PER_READ = 256
MOST_RATIO = 100
"""Largest ratio of unpacked to packed bytes of a .gz; text reaches 20."""
_BLOCK = 1 << 17  # bytes unpacked at once


def find_files(data: Sequence[str] | None) -> list[Path]:
    """Files of a training set, without duplicates, sorted within each name.

    Args:
        data: files, directories and globs; None is the running Python's standard library.

    Raises:
        DataError: a name is not a file, a directory or a glob with a match, or a directory has no text files.
    """
    if data is None:
        return standard_library()
    if not data:
        raise DataError("no data given; name text files, a directory, a glob, .jsonl or .parquet files")
    files = [path for name in data for path in _expand(name)]
    return list(dict.fromkeys(files))


def standard_library() -> list[Path]:
    """Source files of the running Python's standard library: tens of megabytes of text on every machine."""
    root = Path(sysconfig.get_path("stdlib"))
    files = sorted(path for path in root.rglob("*.py") if not NOT_STANDARD.intersection(path.relative_to(root).parts))
    if not files:
        raise DataError(f"this Python has no source of its standard library in {root}; name data with --data")
    return files


def read_documents(files: Iterable[Path], *, field: str = "text") -> Iterator[str]:
    """Reads the non-empty texts of `files` in order.

    Args:
        files: text, JSON-lines or Parquet files; the suffix decides the format.
        field: key or column of the text in JSON lines and Parquet.

    Raises:
        DataError: a file cannot be read, or has no text in `field`.
    """
    for path in files:
        kind = _format_suffix(path)
        try:
            if kind in JSON_LINES_SUFFIXES:
                yield from filter(None, _json_lines(path, field))
            elif kind in PARQUET_SUFFIXES:
                yield from filter(None, _parquet(path, field))
            else:
                with _open(path) as stream:
                    text = stream.read().decode("utf-8", errors="replace")
                if text:
                    yield text
        except (
            OSError,
            EOFError,
            zlib.error,
            Refused,
        ) as error:  # the second and third: a truncated or damaged gzip file
            raise DataError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from error


def read_packages(files: Iterable[Path]) -> Iterator[str]:
    """Reads the standard library's `files` as one document per package; a module outside packages is a document."""
    root = Path(sysconfig.get_path("stdlib"))

    def package(path: Path) -> str:
        return path.relative_to(root).parts[0]

    for _, modules in itertools.groupby(files, key=package):
        text = "".join(f"{module.rstrip()}\n" for module in read_documents(modules) if module.strip())
        if text:
            yield text


def _expand(name: str) -> list[Path]:
    """Files of one name: the file itself, the files of a directory, or the matches of a glob."""
    if not name:  # Path("") is the working directory
        raise DataError("an empty name is no data; name text files, a directory or a glob")
    path = Path(name).expanduser()
    # os.path, not Path, which raises for a name that no file can have.
    if os.path.isdir(path):
        wanted = TEXT_SUFFIXES | JSON_LINES_SUFFIXES | PARQUET_SUFFIXES
        found = sorted(file for file in path.rglob("*") if _format_suffix(file) in wanted and file.is_file())
        if not found:
            raise DataError(f"{name}: no text, .jsonl or .parquet file in this directory")
        return found
    if os.path.exists(path):
        if path.is_char_device():  # /dev/zero never ends
            raise DataError(f"{name}: a device, not a file")
        return [path]
    matches = sorted(Path(match) for match in glob.glob(str(path), recursive=True))
    found = [match for match in matches if match.is_file()]
    if not found:
        raise DataError(f"{name}: no such file, directory or glob with a match")
    return found


def _format_suffix(path: Path) -> str:
    """Suffix that decides the format, without `.gz`."""
    name = path.name.lower().removesuffix(".gz")
    return Path(name).suffix


def _open(path: Path) -> io.BufferedReader | BinaryIO:
    file = open_file(path, pipes=True)
    if not path.name.lower().endswith(".gz"):
        return file
    return io.BufferedReader(Unpacked(file, most_ratio=MOST_RATIO), _BLOCK)


def _json_lines(path: Path, field: str) -> Iterator[str]:
    with _open(path) as raw, io.TextIOWrapper(raw, encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{path}, line {number}: not JSON ({error})") from error
            yield _field_of(row, field, where=f"{path}, line {number}")


def _field_of(row: object, field: str, *, where: str) -> str:
    if not isinstance(row, dict):
        raise DataError(f"{where}: not a JSON object")
    if field not in row:
        raise DataError(f"{where}: no field {field!r}; it has {_join_names(row)}; choose one with --field")
    text = row[field]
    if not isinstance(text, str):
        raise DataError(f"{where}: field {field!r} is not text but {type(text).__name__}")
    # JSON may hold half a surrogate pair, which cannot be encoded.
    return text.encode("utf-8", errors="replace").decode("utf-8")


def _parquet(path: Path, field: str) -> Iterator[str]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise DataError(f"{path}: reading Parquet needs pyarrow; pip install pyarrow") from error
    try:
        with ParquetFile(path) as table:
            columns = table.schema_arrow.names
            if field not in columns:
                raise DataError(f"{path}: no column {field!r}; it has {_join_names(columns)}; choose one with --field")
            for rows in table.iter_batches(batch_size=ROWS_PER_READ, columns=[field]):
                for text in rows.column(0).to_pylist():
                    if text is not None and not isinstance(text, str):
                        raise DataError(f"{path}: column {field!r} is not text but {type(text).__name__}")
                    yield text or ""
    except (ArrowException, UnicodeDecodeError) as error:  # the second: of a text, or of a name
        raise DataError(f"{path}: not a readable Parquet file ({error})") from error


def _join_names(names: Iterable[object], most: int = 8) -> str:
    shown = [str(name) for name in names]
    return ", ".join(shown[:most]) + (", ..." if len(shown) > most else "") if shown else "none"
