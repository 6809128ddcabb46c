"""Counters of the engine: bytes moved, storages saved, times of waits and recomputes."""

from __future__ import annotations

import dataclasses
from typing import Any

from memo.events import StallCause, TierName, UseKind

_HOST, _DISK = TierName.HOST, TierName.DISK


@dataclasses.dataclass(slots=True, kw_only=True)
class Stats:
    """Counters since construction; bytes are cumulative unless a name says peak or live."""

    packed: int = 0
    """Tensors that autograd saved through the engine and that may move."""
    deduplicated: int = 0
    """Number of these tensors whose storage had been saved already."""
    live_entries: int = 0
    """Storages that have handles now."""
    bytes_host: int = 0
    """Bytes copied from the device to the host arena."""
    bytes_disk: int = 0
    """Bytes written from the device to disk."""
    bytes_kept: int = 0
    """Bytes that stayed on the device by placement, or for lack of room elsewhere."""
    bytes_reloaded: int = 0
    """Bytes copied back to the device."""
    bytes_forwarded: int = 0
    """Bytes that backward read from sources not released yet."""
    bytes_recomputed: int = 0
    """Bytes recomputed in backward instead of moved."""
    cancelled: int = 0
    """Copies out that were cancelled before they began."""
    spilled: int = 0
    """Storages that went to another tier because their first was full."""
    failed_writes: int = 0
    """Disk writes that failed; their bytes went to another tier, or the error was raised."""
    bytes_coded: int = 0
    """Bytes of saved values that left the device as codes (`codec`), before they were coded."""
    bytes_codes: int = 0
    """Bytes of those codes and their scales, as they moved."""
    coded_exact: int = 0
    """Storages that moved as they are although a codec was chosen, since a value was NaN, infinite or too large."""
    largest_coded_error: float = 0.0
    """Largest difference of a coded value from what was saved, as a share of the largest magnitude in its group."""
    device_bytes: int = 0
    """Bytes of saved storages on the device now, by the engine's own count."""
    peak_device_bytes: int = 0
    """Largest value of `device_bytes`."""
    recent_peak_bytes: int = 0
    """Largest value of `device_bytes` since `restart_peak`."""
    saved_bytes: int = 0
    """Bytes of saved storages that have handles now, wherever they are: what the device would hold without moving any."""
    peak_saved_bytes: int = 0
    """Largest value of `saved_bytes`."""
    peak_held_bytes: int = 0
    """Most bytes of offloaded storages still on the device when a forward ended, since the program kept a reference."""
    recompute_ns: int = 0
    """Time of the compute streams spent recomputing."""
    uses: dict[UseKind, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(UseKind, 0))
    """First reads of storages by backward, by where it found them."""
    stalls_ns: dict[StallCause, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(StallCause, 0))
    """Time that the compute streams, or the host in their place, waited for copies, by cause."""
    untimed_waits: int = 0
    """Waits whose time was not measured; not in `stalls_ns`."""
    untimed_recomputes: int = 0
    """Recomputes whose time was not measured; not in `recompute_ns`."""

    @property
    def stall_s(self) -> float | None:
        """Seconds spent waiting for copies, all causes; None where the device's time is not measured."""
        return None if self.untimed_waits else sum(self.stalls_ns.values()) / 1e9

    @property
    def recompute_s(self) -> float | None:
        """Seconds spent recomputing; None where the device's time is not measured."""
        return None if self.untimed_recomputes else self.recompute_ns / 1e9

    def moved(self, tier: TierName, nbytes: int) -> None:
        """Counts bytes that left the device for `tier`."""
        if tier is _HOST:
            self.bytes_host += nbytes
        elif tier is _DISK:
            self.bytes_disk += nbytes
        else:
            self.bytes_kept += nbytes

    def began(self, nbytes: int) -> None:
        """Counts a storage that autograd saves."""
        self.live_entries += 1
        self.saved_bytes += nbytes
        if self.saved_bytes > self.peak_saved_bytes:
            self.peak_saved_bytes = self.saved_bytes

    def ended(self, nbytes: int) -> None:
        """Counts a storage whose last handle is gone."""
        self.live_entries -= 1
        self.saved_bytes -= nbytes

    def nothing_lives(self) -> None:
        """Counts no storage that has handles: what an interruption has kept from being counted out is not there."""
        self.live_entries = self.saved_bytes = self.device_bytes = 0

    def came_to_device(self, nbytes: int) -> None:
        """Counts bytes of a saved storage that now take device memory."""
        self.device_bytes += nbytes
        if self.device_bytes > self.peak_device_bytes:
            self.peak_device_bytes = self.device_bytes
        if self.device_bytes > self.recent_peak_bytes:
            self.recent_peak_bytes = self.device_bytes

    def restart_peak(self) -> int:
        """Returns the largest value of `device_bytes` since the last call, and begins anew."""
        peak, self.recent_peak_bytes = self.recent_peak_bytes, self.device_bytes
        return peak


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Bytes and seconds since construction, or between two readings."""

    host_bytes: int = 0
    """Bytes copied from the device to host memory."""
    disk_bytes: int = 0
    """Bytes written from the device to disk."""
    reloaded_bytes: int = 0
    recomputed_bytes: int = 0
    stall_s: float | None = 0.0
    """None where the device's time is not measured, as `recompute_s`."""
    recompute_s: float | None = 0.0

    @classmethod
    def of(cls, stats: Stats) -> Totals:
        """Reads the counters."""
        return cls(
            host_bytes=stats.bytes_host,
            disk_bytes=stats.bytes_disk,
            reloaded_bytes=stats.bytes_reloaded,
            recomputed_bytes=stats.bytes_recomputed,
            stall_s=stats.stall_s,
            recompute_s=stats.recompute_s,
        )

    @property
    def moved_bytes(self) -> int:
        """Bytes copied out of the device."""
        return self.host_bytes + self.disk_bytes

    def since(self, before: Totals) -> Totals:
        """Totals between an earlier reading and this one."""
        names = [field.name for field in dataclasses.fields(self)]
        return Totals(**{name: _less(getattr(self, name), getattr(before, name)) for name in names})


def _less(now: Any, before: Any) -> Any:
    """Difference; None where either was not measured."""
    return None if now is None or before is None else now - before
