"""Device memory of a simulated GPU, storage by storage, as torch's caching allocator would divide it.

A storage counts from its creation to its end, in the order of the host, as the allocator of one stream sees it. Where the
allocator finds no room, its unused segments are returned to the driver once, as torch does before it raises.
"""

from __future__ import annotations

import weakref

import torch

from memo.allocator import CachedBlock, CachingAllocator, Segments
from memo.units import format_bytes


class _Held(weakref.ref[torch.UntypedStorage]):
    """A storage that takes device memory, until it is gone."""

    __slots__ = ("block", "key", "nbytes")

    block: CachedBlock | None
    """None while it has given its memory up."""
    nbytes: int
    key: int


class SimulatedDeviceMemory:
    """Memory of one device.

    Args:
        capacity: bytes that the process can take from the driver; more raise torch.OutOfMemoryError.
        segments: kind of the allocator's segments.
    """

    def __init__(self, capacity: int, segments: Segments = Segments.EXPANDABLE) -> None:
        self.capacity = capacity
        self.used = self.peak = 0
        """Bytes of storages now, and the most since `restart`."""
        self.step_peak = 0
        """The most since the program's own `begin_step`."""
        self._held: dict[int, _Held] = {}  # by the storage's id
        self._allocator = CachingAllocator(segments, capacity)

    @property
    def reserved(self) -> int:
        """Bytes taken from the driver."""
        return self._allocator.reserved_nbytes

    def restart(self) -> bool:
        """Restarts the peak, which belongs to whoever measures."""
        self.peak = self.used
        return True

    def begin_step(self) -> None:
        """Restarts the step's own peak."""
        self.step_peak = self.used

    def add(self, storage: torch.UntypedStorage) -> None:
        """Counts a new storage until it is gone.

        Raises:
            torch.OutOfMemoryError: the device has no room.
        """
        if storage.nbytes():
            held = _Held(storage, self._gone)
            held.nbytes, held.key, held.block = storage.nbytes(), id(storage), None
            self._take(held)
            self._held[held.key] = held

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is in this memory."""
        return id(tensor.untyped_storage()) in self._held

    def emptied(self, storage: torch.UntypedStorage) -> None:
        """Counts a storage no longer that has given up its memory and lives on."""
        held = self._held.get(id(storage))
        if held is not None:
            self._give_back(held)

    def refilled(self, storage: torch.UntypedStorage) -> None:
        """Counts an emptied storage again.

        Raises:
            torch.OutOfMemoryError: the device has no room.
        """
        held = self._held.get(id(storage))
        if held is not None and held.block is None:
            self._take(held)

    def _take(self, held: _Held) -> None:
        nbytes = held.nbytes
        try:
            held.block = self._allocator.malloc(nbytes)
        except MemoryError:
            raise torch.OutOfMemoryError(
                f"CUDA out of memory (simulated). Tried to allocate {format_bytes(nbytes)}. GPU 0 has a total capacity of "
                f"{format_bytes(self.capacity)} of which {format_bytes(self.capacity - self.reserved)} is free. Of the "
                f"allocated memory {format_bytes(self.used)} is allocated by PyTorch, and "
                f"{format_bytes(self.reserved - self.used)} is reserved by PyTorch but unallocated."
            ) from None
        self.used = used = self.used + nbytes
        if used > self.peak:
            self.peak = used
        if used > self.step_peak:
            self.step_peak = used

    def _gone(self, held: weakref.ref[torch.UntypedStorage]) -> None:
        assert isinstance(held, _Held)
        if self._held.get(held.key) is held:  # not one for which there was no room
            del self._held[held.key]
            self._give_back(held)

    def _give_back(self, held: _Held) -> None:
        if held.block is not None:
            self._allocator.free(held.block)
            self.used -= held.nbytes
            held.block = None
