"""The corpora of all readers in one archive: each input reached a branch of memo's code that none before it did."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path

ARCHIVE = Path(__file__).with_name("corpus.tar.xz")


def unpacked(archive: Path = ARCHIVE) -> dict[str, list[bytes]]:
    """Inputs by the names of their readers."""
    found: dict[str, list[bytes]] = {}
    with tarfile.open(archive) as packed:
        for member in packed:
            content = packed.extractfile(member)
            assert content is not None
            found.setdefault(member.name.partition("/")[0], []).append(content.read())
    return found


def pack(inputs: Mapping[str, Sequence[bytes]], archive: Path = ARCHIVE) -> None:
    """Writes the archive: the same bytes for the same inputs."""
    with tarfile.open(archive, "w:xz", preset=9) as packed:
        for name in sorted(inputs):
            for number, content in enumerate(sorted(set(inputs[name]))):
                member = tarfile.TarInfo(f"{name}/{number}")
                member.size = len(content)
                packed.addfile(member, io.BytesIO(content))
