"""One way's work as a process is asked for it, and the names of the ways that only these tables have."""

from __future__ import annotations

import dataclasses
from typing import Any

from benchmarks.peers.models import Shape

AUTOMATIC = "memo, automatic"
SAVED_TENSORS = "memo.saved_tensors"
ALPHAS = {"all moved": 1.0, "alpha 1/2": 0.5, "alpha 0": 0.0}
INPUTS = "memo, inputs moved"
"""Level SAVE_INPUT in every layer: as offloaded checkpointing, to any tier."""
IDENTITY = "hooks that do nothing"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """Model, way and limits of one process."""

    way: str
    shape: Shape
    device: str
    limit_bytes: int | None = None
    """Device memory, or on a CPU data of the process (RLIMIT_DATA), beside what torch takes when it is loaded."""
    device_bytes: int | None = None
    """memo's automatic plan: its budget."""
    host_bytes: int | str = 0
    disk: str | None = None
    """Folder of memo's disk tier; None: it has none."""
    min_bytes: int | None = None
    counted: bool = True
    count: bool = False
    """Count the saved tensors of a step without memo."""
    trl: str | None = None

    def to_json(self) -> dict[str, Any]:
        """As it crosses the pipe."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, body: dict[str, Any]) -> Request:
        """The inverse of `to_json`."""
        return cls(**{**body, "shape": Shape(**body["shape"])})
