"""What keeps a plan from being faster: resources that the model shares out, and the rows that a solution meets exactly."""

from __future__ import annotations

import dataclasses
import enum

__all__ = ["Limit", "Resource"]


class Resource(enum.StrEnum):
    """What a row of the model shares out."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"
    WEAR = "disk wear"
    COPY_OUT = "copy out"
    COPY_IN = "copy in"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limit:
    """A row that a solution meets exactly."""

    resource: Resource
    where: str
    saving: float
    """Seconds that a step would win for each further byte (device, host, disk, wear a day), or second of a window."""
