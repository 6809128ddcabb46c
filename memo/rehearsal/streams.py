"""Streams and events of a simulated GPU, in the place of torch.cpu's, which have no times.

FSDP2 takes streams and events from the module of its device's type. For the tensors of a rehearsal, which are the CPU's,
that is torch.cpu.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memo.rehearsal.clock import Clock, StreamClock


class _Event:
    """torch.cpu.Event."""

    def __init__(self, streams: _Streams) -> None:
        self._streams = streams
        self.end_ns = 0

    def record(self, stream: _Stream | None = None) -> _Event:
        clock = self._streams.current.clock if stream is None else stream.clock
        self.end_ns = clock.end_ns
        return self

    def wait(self, stream: _Stream | None = None) -> None:
        (stream or self._streams.current).wait_event(self)

    def query(self) -> bool:
        return self.end_ns <= self._streams.device.host_ns

    def synchronize(self) -> None:
        self._streams.device.wait(self.end_ns)


class _Stream:
    """torch.cpu.Stream."""

    def __init__(self, streams: _Streams, clock: StreamClock) -> None:
        self._streams = streams
        self.clock = clock

    def record_event(self, event: _Event | None = None) -> _Event:
        return (event or _Event(self._streams)).record(self)

    def wait_event(self, event: _Event) -> None:
        self.clock.end_ns = max(self.clock.end_ns, event.end_ns)

    def wait_stream(self, stream: _Stream) -> None:
        self.clock.end_ns = max(self.clock.end_ns, stream.clock.end_ns)

    def query(self) -> bool:
        return self.clock.end_ns <= self._streams.device.host_ns

    def synchronize(self) -> None:
        self._streams.device.wait(self.clock.end_ns)


class _Streams:
    """Functions of torch.cpu."""

    def __init__(self, device: Clock) -> None:
        self.device = device
        self.current = _Stream(self, device.compute)

    def current_stream(self, device: object = None) -> _Stream:
        return self.current

    @contextlib.contextmanager
    def stream(self, stream: _Stream | None) -> Iterator[None]:
        before = self.current
        self._choose(stream or before)
        try:
            yield
        finally:
            self._choose(before)

    def _choose(self, stream: _Stream) -> None:
        self.current, self.device.current = stream, stream.clock

    def new_stream(self, priority: int = 0) -> _Stream:
        return _Stream(self, self.device.new_stream())

    def new_event(self, **options: Any) -> _Event:
        return _Event(self)


@contextlib.contextmanager
def streams_on(clock: Clock) -> Iterator[None]:
    """Gives torch.cpu streams and events on the clock of a simulated device."""
    streams = _Streams(clock)
    replaced: dict[str, Any] = {
        "Stream": streams.new_stream,
        "Event": streams.new_event,
        "current_stream": streams.current_stream,
        "stream": streams.stream,
    }
    before = {name: getattr(torch.cpu, name) for name in replaced}
    for name, function in replaced.items():
        setattr(torch.cpu, name, function)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(torch.cpu, name, function)
