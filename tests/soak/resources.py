"""What the process of a soak holds: sampled while it runs, and told to be flat by a line of least squares."""

from __future__ import annotations

import dataclasses
import gc
import os
import stat
import statistics
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from memo.machine import rss_bytes, trim_heap

LIMITS: dict[str, Callable[[float], float]] = {
    "rss_bytes": lambda mean: 0.1 * mean,  # free memory between what lives grows in steps, to an end
    "descriptors": lambda mean: 1.0,
    "threads": lambda mean: 1.0,
    "disk_bytes": lambda mean: 0.02 * mean,
}
"""The most that each may rise over the second half of a run, by its mean there."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """What the process held after a step, once garbage is collected and the heap trimmed."""

    steps: int
    """Steps that were run until then, repeated ones included."""
    rss_bytes: int
    descriptors: int
    threads: int
    disk_bytes: int
    """Blocks of its open files without a name, which are scratch, and of its checkpoints."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Trend:
    """A line by least squares through the samples of a run's second half."""

    mean: float
    slope_per_1000_steps: float
    rise: float
    """Of the line, from the first to the last of these samples."""
    limit: float
    """The most that the rise may be."""

    @property
    def flat(self) -> bool:
        """True if the rise is within the limit."""
        return self.rise <= self.limit


def sample(steps: int, checkpoints: Path) -> Sample:
    """Takes a sample."""
    gc.collect()
    trim_heap()
    descriptors, disk = 0, 0
    for name in os.listdir("/proc/self/fd"):
        try:
            found = os.fstat(int(name))
        except OSError:  # the listing's own
            continue
        descriptors += 1
        if stat.S_ISREG(found.st_mode) and not found.st_nlink:
            disk += 512 * found.st_blocks
    for path in checkpoints.glob("step-*/*"):  # complete ones: what is being written comes and goes
        try:
            disk += 512 * path.stat().st_blocks
        except FileNotFoundError:  # removed meanwhile
            continue
    return Sample(
        steps=steps,
        rss_bytes=rss_bytes(),
        descriptors=descriptors,
        threads=threading.active_count(),
        disk_bytes=disk,
    )


def trends(samples: Sequence[Sample]) -> dict[str, Trend]:
    """The trend of each resource; needs four samples.

    Raises:
        ValueError: there are fewer.
    """
    if len(samples) < 4:
        raise ValueError(f"a trend needs four samples, not {len(samples)}")
    half = samples[len(samples) // 2 :]
    steps = [one.steps for one in half]
    found = {}
    for name, limit in LIMITS.items():
        values = [float(getattr(one, name)) for one in half]
        mean, slope = statistics.fmean(values), statistics.linear_regression(steps, values).slope
        found[name] = Trend(
            mean=mean,
            slope_per_1000_steps=1000 * slope,
            rise=slope * (steps[-1] - steps[0]),
            limit=limit(mean),
        )
    return found
