"""The setting of steps without a plan, and the bytes that a plan may use.

memo.autoplan.controller decides what is applied; memo.autoplan.actuator applies it.
"""

from __future__ import annotations

import dataclasses

from memo.swap import Level

MEASURING = Level.SAVE_ATTENTION
"""Level of all layers while no plan is in use: attention outputs and layer inputs move, and the rest is recomputed."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bytes that one rank's saved tensors may take in each tier, and what else the device holds."""

    device_bytes: int
    others_bytes: int
    """Most bytes of device memory in use for anything but saved tensors."""
    around_bytes: int = 0
    """Most device bytes beside saved tensors before, after and between the layers."""
    beside_layers: tuple[int, ...] = ()
    """Most such bytes while each layer runs; empty where only the whole step was measured."""
    beside_recomputes: tuple[int, ...] = ()
    """Most such bytes while each layer is recomputed, what the recompute holds included; 0 for those that were not."""
    absent_layers: tuple[int, ...] = ()
    """Least bytes of each layer's saved tensors that are not there at its backward's peak, at the setting of steps without a
    plan; empty or 0 where its recompute does not run in parts."""
    host_bytes: int
    disk_bytes: int
