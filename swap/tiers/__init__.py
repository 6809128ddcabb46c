"""Tiers: the memories that moved bytes rest in (device, host, disk)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memo.lazy import attach

if TYPE_CHECKING:
    from memo.swap.tiers.host_and_disk import DiskTier as DiskTier, HostTier as HostTier
    from memo.swap.tiers.tier import Extent as Extent, Tier as Tier
else:
    __getattr__, __dir__, __all__ = attach(__name__)
