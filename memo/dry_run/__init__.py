"""Dry run of a plan's layout: every rank's step in one process, without devices, bytes or other ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memo.lazy import attach

if TYPE_CHECKING:
    from memo.dry_run.all_ranks import DryRun as DryRun, dry_run as dry_run
    from memo.dry_run.fsdp_storages import storages_without_memory as storages_without_memory
    from memo.dry_run.recorded_collectives import COLLECTIVES as COLLECTIVES, collective_of as collective_of
else:
    __getattr__, __dir__, __all__ = attach(__name__)
