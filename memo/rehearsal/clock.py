"""Clocks of a simulated GPU: the host's, and for each stream the time until which it has work.

    host      launch | launch | launch | wait ................. |
    compute            kernel 1        | kernel 2      | kernel 3 |
    network                 all-gather       | reduce-scatter |

The host runs ahead: a launch takes the host a few microseconds, and the kernel begins when the one before it in its stream
has ended. The host waits only where the program does. All times are nanoseconds.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(slots=True)
class StreamClock:
    """A stream of the device."""

    end_ns: int = 0
    """End of the work that it has been given."""


class Clock:
    """Clocks of one device.

    Args:
        launch_ns: host time of one operator: Python, dispatcher and launch.
    """

    def __init__(self, launch_ns: int) -> None:
        self.host_ns = 1_000_000_000
        self.compute = StreamClock(self.host_ns)
        self.current = self.compute
        """The stream that kernels are given to."""
        self._communicators: dict[object, int] = {}
        self._streams = [self.compute]
        self._launch_ns = launch_ns

    @property
    def compute_ns(self) -> int:
        """End of the work that the compute stream has been given."""
        return self.compute.end_ns

    def new_stream(self) -> StreamClock:
        """A further stream, without work."""
        self._streams.append(StreamClock())
        return self._streams[-1]

    def run(self, kernel_ns: int) -> None:
        """Launches a kernel in the current stream."""
        self.host_ns = host = self.host_ns + self._launch_ns
        stream = self.current
        stream.end_ns = max(stream.end_ns, host) + kernel_ns

    def communicate(self, collective_ns: int, ranks: object) -> int:
        """Launches a collective among `ranks` after the current stream's work; returns its end, for which nothing waits yet.

        Those of the same ranks follow one another. One that meets another's has half of the links while both run; what the
        other loses by it is not counted.
        """
        known = self._communicators
        self.host_ns += self._launch_ns
        begin = max(self.current.end_ns, known.get(ranks, 0), self.host_ns)
        beside_ns = max((end_ns - begin for other, end_ns in known.items() if other != ranks), default=0)
        known[ranks] = begin + collective_ns + min(collective_ns, max(0, beside_ns))
        return known[ranks]

    def await_until(self, end_ns: int) -> None:
        """Has the current stream's further work wait."""
        self.current.end_ns = max(self.current.end_ns, end_ns)

    def wait(self, until_ns: int) -> None:
        """Blocks the host."""
        self.host_ns = max(self.host_ns, until_ns)

    def finish(self) -> None:
        """Blocks the host until all streams are idle."""
        self.wait(max(stream.end_ns for stream in self._streams))
