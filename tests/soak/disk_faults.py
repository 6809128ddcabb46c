"""The faults of a disk hour: what each does to the second of two directories, and the errors that may come of it."""

from __future__ import annotations

import dataclasses
import errno
from typing import Any

from memo.errors import MemoError, ScratchFull, StoreReadError, StoreWriteError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of fault of the second directory."""

    errors: tuple[type[MemoError], ...] = ()
    """What the step ends in; empty: it goes on."""
    first: dict[str, int | None] = dataclasses.field(default_factory=dict)
    """Operations of the scratch file that fail, each with the microbatches from the drawn operation to the first failure;
    None: from the beginning of the drawn microbatch."""
    given: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Arguments of Faults.fail."""
    leaves_out: bool = False
    """The same manager does not use the directory in another step."""
    both: bool = False
    """The first directory, too."""
    option: dict[str, Any] | None = None
    """Arguments of memo.offload for a manager of this step's own."""


_WRITE, _READ, _FULL, SMALL = StoreWriteError, StoreReadError, ScratchFull, "drive-small"
_EIO, _EIOS, _ENOSPCS = (
    {"errno": errno.EIO},
    {"errno": errno.EIO, "sticky": True},
    {"errno": errno.ENOSPC, "sticky": True},
)
_SLOW = {"delay": 0.1, "sticky": True}
KINDS = {
    "full drive (ENOSPC)": Kind(first={"write": 0}, given=_ENOSPCS, leaves_out=True),
    "slow drive (100 ms a call)": Kind(first={"write": 0, "read": 0}, given=_SLOW),
    "stalled drive (35 s)": Kind(first={"write": 0}, given={"delay": 35.0}),
    "one write fails (EIO)": Kind(first={"write": 0}, given=_EIO, leaves_out=True),
    "one read fails (EIO)": Kind(first={"read": 0}, given=_EIO),
    "reads fail (EIO)": Kind(errors=(_READ,), first={"read": 0}, given=_EIOS, leaves_out=True),
    "drive lost in forward": Kind(errors=(_READ,), first={"write": 0, "read": None}, given=_EIOS, leaves_out=True),
    "drive lost in backward": Kind(errors=(_READ,), first={"read": 0, "write": 2}, given=_EIOS, leaves_out=True),
    "both drives lost": Kind(errors=(_WRITE, _READ), first={"write": 0, "read": 0}, given=_EIOS, both=True),
    "budget too small": Kind(errors=(_FULL,), option={"disk_budget": "512MiB"}),
    "file system too small": Kind(errors=(_FULL,), option={"disk": SMALL}),
}
