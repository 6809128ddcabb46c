"""Disk tier I/O: anonymous scratch files, I/O threads, bounce buffers for device tensors, GPUDirect Storage."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memo.lazy import attach

if TYPE_CHECKING:
    from memo.swap.disk.bounce_buffers import StagedDisk as StagedDisk
    from memo.swap.disk.gds import GdsDisk as GdsDisk
    from memo.swap.disk.gds_probe import (
        in_memory as in_memory,
        mount_of as mount_of,
        obstacles as obstacles,
        try_gds as try_gds,
    )
    from memo.swap.disk.operation import DiskExtent as DiskExtent
    from memo.swap.disk.raw_file import RawFile as RawFile
    from memo.swap.disk.store import DiskStore as DiskStore
else:
    __getattr__, __dir__, __all__ = attach(__name__)
