"""A stand-in for torch.cuda, so that the CUDA backend's own code runs without a GPU: streams that put everything off.

The host is the compute stream. What is copied under another stream waits in that stream's queue until an event behind it is
waited for, so a copy that nothing orders is not seen. Memory is the host's.
"""

from __future__ import annotations

import collections
import contextlib
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from memo.swap.backends import CudaBackend


class Stream:
    """In order, as late as may be; the compute stream at once."""

    def __init__(self, cuda: StandinCuda, device: Any = None, *, is_compute: bool = False) -> None:
        self.cuda = cuda
        self.is_compute = is_compute
        self.copies = 0
        self.done = 0
        self.issued = 0
        self._queue: collections.deque[Callable[[], object]] = collections.deque()

    def issue(self, work: Callable[[], object]) -> None:
        self.issued += 1
        if self.is_compute:
            work()
            self.done += 1
        else:
            self._queue.append(work)

    def run_until(self, position: int) -> None:
        with self.cuda.lock:
            while self.done < position:
                self._queue.popleft()()
                self.done += 1

    def wait_event(self, event: Event) -> None:
        self.issue(event.run)

    def synchronize(self) -> None:
        self.run_until(self.issued)


class Event:
    """At a place in a stream, at a time of the stand-in's clock."""

    def __init__(self, cuda: StandinCuda, *, enable_timing: bool = False, blocking: bool = False) -> None:
        self.cuda = cuda
        self.enable_timing = enable_timing
        self.blocking = blocking
        self.at_ms = 0.0
        self._stream: Stream | None = None
        self._position = 0

    def record(self, stream: Stream) -> None:
        stream.issue(self._stamp)
        self._stream, self._position = stream, stream.issued

    def _stamp(self) -> None:
        self.at_ms = self.cuda.now_ms

    def query(self) -> bool:
        return self._stream is None or self._stream.done >= self._position

    def run(self) -> None:
        if self._stream is not None:
            self._stream.run_until(self._position)

    synchronize = run

    def elapsed_time(self, other: Event) -> float:
        assert self.enable_timing
        assert other.enable_timing
        assert other.query(), "the driver refuses an event that is not over"
        return float(np.float32(other.at_ms - self.at_ms))


class StandinCuda:
    """Takes torch.cuda's place as far as memo.swap.backends.cuda goes, for the time of a test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lock = threading.RLock()
        self.now_ms = 0.0
        self.streams: list[Stream] = []
        self.locked: dict[int, int] = {}
        """Pinned ranges."""
        self.locked_ever = 0
        self.lock_limit: int | None = None
        self.at_lock: Callable[[], object] = lambda: None
        self.last_error = 0
        self.capturing = False
        self.ranges: list[str] = []
        """The profiler's, in the order in which they were opened."""
        self.open_ranges: dict[int, str] = {}
        self.recorded: list[Stream] = []
        """The streams that the allocator was told of, one for each use beside a buffer's own."""
        self.compute = Stream(self, is_compute=True)
        self._current = threading.local()
        for name, value in {
            "Stream": self._new_stream,
            "Event": lambda **options: Event(self, **options),
            "stream": self._entered,
            "current_stream": lambda device=None: self.current,
            "current_device": lambda: 0,
            "device": lambda device: contextlib.nullcontext(),
            "synchronize": lambda device=None: [stream.synchronize() for stream in self.streams],
            "cudart": lambda: SimpleNamespace(cudaHostRegister=self._lock_pages, cudaHostUnregister=self.locked.pop),
            "get_device_properties": lambda device: SimpleNamespace(),  # says nothing of its place on the bus
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)
        for name, value in {
            "_cuda_getCurrentRawStream": lambda index: id(self.current),
            "_cuda_isCurrentStreamCapturing": lambda: self.capturing,
        }.items():
            monkeypatch.setattr(torch._C, name, value, raising=False)  # a build for the CPU has neither
        monkeypatch.setattr(torch.cuda.nvtx, "range_start", self._begin_range)
        monkeypatch.setattr(torch.cuda.nvtx, "range_end", self.open_ranges.pop)
        monkeypatch.setattr(torch.Tensor, "record_stream", lambda _, stream: self.recorded.append(stream))
        copy, zeros = torch.Tensor.copy_, torch.zeros

        def copied(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
            stream = self.current
            if stream.is_compute:
                return copy(target, source)
            assert non_blocking, "a copy beside the compute stream that the host waits for"
            self._check_registration(target)
            self._check_registration(source)
            stream.copies += 1
            stream.issue(lambda: copy(target, source))
            return target

        def made(*size: Any, device: Any = None, **options: Any) -> torch.Tensor:
            if device == "cuda" and self.last_error:
                self.last_error = 0
                raise RuntimeError("CUDA error: an earlier call's")
            return zeros(*size, **options) if device == "cuda" else zeros(*size, device=device, **options)

        monkeypatch.setattr(torch.Tensor, "copy_", copied)
        monkeypatch.setattr(torch, "zeros", made)

    @property
    def current(self) -> Stream:
        return getattr(self._current, "stream", self.compute)

    def _begin_range(self, name: str) -> int:
        self.ranges.append(name)
        self.open_ranges[len(self.ranges)] = name
        return len(self.ranges)

    def _new_stream(self, device: Any = None) -> Stream:
        self.streams.append(Stream(self, device))
        return self.streams[-1]

    @contextlib.contextmanager
    def _entered(self, stream: Stream) -> Iterator[None]:
        before, self._current.stream = self.current, stream
        try:
            yield
        finally:
            self._current.stream = before

    def _check_registration(self, block: torch.Tensor) -> None:
        """The driver refuses a copy that is in one registration and out of it."""
        first, end = block.data_ptr(), block.data_ptr() + block.numel()
        for start, nbytes in list(self.locked.items()):
            assert end <= start or start + nbytes <= first or (start <= first and end <= start + nbytes)

    def _lock_pages(self, address: int, nbytes: int, flags: int) -> int:
        self.at_lock()
        if self.lock_limit is not None and sum(self.locked.values()) + nbytes > self.lock_limit:
            self.last_error = 2  # cudaErrorMemoryAllocation
            return self.last_error
        self.locked[address] = nbytes
        self.locked_ever += nbytes
        return 0


class OnHostMemory(CudaBackend):
    """The CUDA backend over the stand-in; its device memory is the host's."""

    def __init__(self, *, timing: bool = False) -> None:
        super().__init__(torch.device("cuda", 0), timing=timing)
        self.device = torch.device("cpu")
