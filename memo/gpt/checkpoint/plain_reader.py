"""Reader of torch.distributed.checkpoint's files that takes tensors and nothing else, so that no checkpoint runs code.

torch's own reader unpickles `.metadata` as it stands, loads values that are no tensors as pickles of any kind, and unpacks
compressed archives of any size. This one names the few classes that torch writes to `.metadata`, refuses other values, and
refuses archives whose records are packed. It compares the checksums that torch only writes: blocks that a power loss left
zeroed would be weights. It is torch's otherwise.

    .metadata     which tensors there are, and where their parts lie      names of classes: `_CLASSES`, and dtypes
    __0_0.distcp  one archive after the other, each with a tensor's part  torch.load(weights_only=True), records as they are
"""

from __future__ import annotations

import errno
import io
import os
import pickle
import zipfile
from pathlib import Path
from typing import IO, Any, cast

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)

from memo.bounded_files import Refused, is_file_name

_HERE = "torch.distributed.checkpoint"
_CLASSES = frozenset(
    {
        *(
            (f"{_HERE}.metadata", name)
            for name in (
                "BytesStorageMetadata",
                "ChunkStorageMetadata",
                "Metadata",
                "MetadataIndex",
                "StorageMeta",
                "TensorProperties",
                "TensorStorageMetadata",
                "_MEM_FORMAT_ENCODING",
            )
        ),
        (f"{_HERE}.filesystem", "_StorageInfo"),
        ("torch", "Size"),
        ("torch.serialization", "_get_layout"),
        ("pathlib", "PosixPath"),
        ("pathlib._local", "PosixPath"),  # of Python 3.13
    }
)
"""Classes that torch writes to `.metadata`, beside dtypes; each makes a value and has no other effect."""


class PlainReader(FileSystemReader):
    """torch's reader of a checkpoint's directory, for tensors alone. Raises `Refused` for what it does not take."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Reads and checks `.metadata`.

        Raises:
            Refused: it is damaged, names another class or another folder, or has a value that is no tensor.
            OSError: it cannot be read.
        """
        content = Path(self._get_metadata_path(kwargs.get("rank"))).read_bytes()
        try:
            metadata = _Unpickler(io.BytesIO(content)).load()
        except Refused:
            raise
        except Exception as error:  # pickle raises errors of many types on damaged files
            raise Refused(f".metadata is damaged: {type(error).__name__}") from None
        _check(metadata)
        if getattr(metadata, "storage_meta", None) is None:
            metadata.storage_meta = StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return cast("Metadata", metadata)

    def verify(self) -> None:
        """Reads all parts and compares their checksums.

        Raises:
            Refused: a part is damaged, or is not as torch writes it.
            OSError: a file cannot be read.
        """
        for place in self.read_metadata().storage_data.values():
            with open(Path(self.path) / place.relative_path, "rb") as file:
                _verify_part(file, place)

    def _slice_file(self, file: Any, sinfo: Any) -> IO[bytes]:
        _verify_part(file, sinfo)
        return super()._slice_file(file, sinfo)


def _verify_part(file: Any, place: Any) -> None:
    """Compares a part's records with their CRC-32, which torch writes and does not read; no record may be packed."""
    damaged = Refused(f"{place.relative_path} is damaged within bytes {place.offset} to {place.offset + place.length}")
    try:
        archive = zipfile.ZipFile(io.BufferedReader(_Part(file, place.offset, place.length)))
        records = archive.infolist()
        packed = any(record.compress_type != zipfile.ZIP_STORED for record in records)
        if packed or sum(record.file_size for record in records) > place.length:
            raise Refused(f"{place.relative_path} has packed records, which torch does not write")
        if archive.testzip() is not None:
            raise damaged
    except Refused:
        raise
    except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError, ValueError):
        raise damaged from None


class _Part(io.RawIOBase):
    """Bytes [offset, offset + length) of a file, for zipfile: torch's own view of them cannot seek from its end."""

    def __init__(self, file: Any, offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._at = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET, /) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        self._at = base + offset
        return self._at

    def readinto(self, buffer: Any, /) -> int:
        self._file.seek(self._offset + self._at)
        content = self._file.read(max(0, min(len(buffer), self._length - self._at)))
        buffer[: len(content)] = content
        self._at += len(content)
        return len(content)


class _Unpickler(pickle._Unpickler):
    """Unpickler of what `_CLASSES` names, in Python, whose memory is bounded by the file's size."""

    def find_class(self, module_name: str, global_name: str, /) -> Any:
        known = (module_name, global_name) in _CLASSES
        if not known and not (module_name == "torch" and isinstance(getattr(torch, global_name, None), torch.dtype)):
            raise Refused(
                f".metadata names {f'{module_name}.{global_name}'[:80]!r}, which no checkpoint of tensors does"
            )
        return super().find_class(module_name, global_name)


def _check(metadata: object) -> None:
    """Checks what torch reads of the metadata.

    Raises:
        Refused: a part has another type than torch writes, lies outside the checkpoint, or is no tensor's.
    """
    entries, places = (getattr(metadata, name, None) for name in ("state_dict_metadata", "storage_data"))
    if not isinstance(metadata, Metadata) or not isinstance(entries, dict) or not isinstance(places, dict):
        raise Refused(".metadata is damaged: it is no list of tensors")
    for name, entry in entries.items():
        if isinstance(entry, BytesStorageMetadata):
            raise Refused(f".metadata has {str(name)[:80]!r}, which is no tensor")
        if not isinstance(name, str) or not _is_tensor(entry):
            raise Refused(f".metadata is damaged at {str(name)[:80]!r}")
    for index, place in places.items():
        path, offset, length = (getattr(place, name, None) for name in ("relative_path", "offset", "length"))
        whole = all(type(number) is int and number >= 0 for number in (offset, length))
        if not isinstance(index, MetadataIndex) or not isinstance(path, str) or not whole:
            raise Refused(".metadata is damaged: a part has no place")
        if not is_file_name(path):
            raise Refused(f".metadata names {path[:80]!r}, which is outside the checkpoint")
        if getattr(place, "transform_descriptors", None):
            raise Refused(".metadata asks for transforms, which memo does not write")


def _is_tensor(entry: object) -> bool:
    chunks, properties = getattr(entry, "chunks", None), getattr(entry, "properties", None)
    return (
        isinstance(entry, TensorStorageMetadata)
        and isinstance(getattr(entry, "size", None), torch.Size)
        and isinstance(getattr(properties, "dtype", None), torch.dtype)
        and isinstance(chunks, list)
        and all(isinstance(getattr(chunk, name, None), torch.Size) for chunk in chunks for name in ("offsets", "sizes"))
    )
