"""Bytes that a way to hold activations copied between device and host."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(slots=True, kw_only=True)
class Moved:
    """Counters since construction."""

    out_bytes: int = 0
    back_bytes: int = 0

    def since(self, earlier: Moved) -> Moved:
        """The difference."""
        return Moved(out_bytes=self.out_bytes - earlier.out_bytes, back_bytes=self.back_bytes - earlier.back_bytes)

    def shared(self, steps: int) -> Moved:
        """In one of so many equal steps."""
        return Moved(out_bytes=self.out_bytes // steps, back_bytes=self.back_bytes // steps)
