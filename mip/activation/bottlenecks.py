"""Resources that the linear program shares out, and the rows that are binding in a solution."""

from __future__ import annotations

import dataclasses
import enum

__all__ = ["Limit", "Resource"]


class Resource(enum.StrEnum):
    """A resource that a row of the program shares out."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
    WEAR = "disk wear"
    COPY_OUT = "copy out"
    COPY_IN = "copy in"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A binding row of a solution."""

    resource: Resource
    where: str
    saving: float
    """Dual value: seconds of a step per further byte (device, host, disk, wear a day), or per second of a window."""
