"""Clocks of a simulated GPU: the host's, and the time until which the compute stream has work.

    host      launch | launch | launch | wait ................. |
    compute            kernel 1        | kernel 2      | kernel 3 |

The host runs ahead: a launch takes the host a few microseconds, and the kernel begins when the one before it has ended. The
host waits only where the program does. All times are nanoseconds.
"""

from __future__ import annotations


class Clock:
    """Clocks of one device.

    Args:
        launch_ns: host time of one operator: Python, dispatcher and launch.
    """

    def __init__(self, launch_ns: int) -> None:
        self.host_ns = 1_000_000_000
        self.compute_ns = self.host_ns
        """End of the work that the compute stream has been given."""
        self._launch_ns = launch_ns

    def run(self, kernel_ns: int) -> None:
        """Launches a kernel."""
        self.host_ns = host = self.host_ns + self._launch_ns
        self.compute_ns = max(self.compute_ns, host) + kernel_ns

    def wait(self, until_ns: int) -> None:
        """Blocks the host."""
        self.host_ns = max(self.host_ns, until_ns)

    def finish(self) -> None:
        """Blocks the host until the compute stream is idle."""
        self.wait(self.compute_ns)
