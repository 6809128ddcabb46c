"""The longest sequence that each way trains under a fixed cap of device memory, by bisection.

A try is one forward and backward from fresh weights, with torch's allocator capped. The peaks of the longest two lengths
that fitted tell where the next try is worth its time, within the bracket that is left. Positions are rotary, so that the
length changes no parameter.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.comparison import Setup, guarded, now, release_memory, train_step
from memo.units import format_bytes

if TYPE_CHECKING:
    from benchmarks.peers.ways import Way
    from memo.gpt.config import GPTConfig

STEP_TOKENS = 1024
"""Lengths are multiples of it."""
PART = 32
"""The search ends when the bracket is no wider than 1/32 of the length."""
FILLED = 0.98
"""Share of the cap that the next try is meant to fill: a miss on either side costs one more try."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Outcome of a search."""

    fits: int
    """Longest length that ran; 0: none did."""
    fails: int | None
    """Shortest that did not; None: none was met."""
    peak_bytes: int
    """At `fits`."""
    tries: int
    why: str | None
    """The first line of the last failure."""
    complete: bool
    """False: the time was over before the bracket was narrow enough."""


def bisect(
    peak_of: Callable[[int], int | str],
    *,
    cap: int,
    first: int,
    most: int,
    deadline: float,
    step: int = STEP_TOKENS,
    part: int = PART,
) -> Found:
    """Searches the longest multiple of `step`, of `most` at most, for which `peak_of` gives a peak and not a reason.

    `first` is tried first, and the last bracket is no wider than 1/`part` of the length. No try begins after `deadline`, in
    the seconds of time.monotonic.
    """
    peaks: dict[int, int] = {}
    fails: int | None = None
    why: str | None = None
    tries, length = 0, first // step * step or step
    while length and time.monotonic() < deadline:
        tries += 1
        found = peak_of(length)
        if isinstance(found, str):
            fails, why = length, found
        else:
            peaks[length] = found
        length = _next(peaks, fails, cap, most // step * step, step, part)
    fits = max(peaks, default=0)
    return Found(fits=fits, fails=fails, peak_bytes=peaks.get(fits, 0), tries=tries, why=why, complete=length == 0)


def _next(peaks: dict[int, int], fails: int | None, cap: int, most: int, step: int, part: int) -> int:
    """The next length to try; 0: the bracket is narrow enough."""
    fits = max(peaks, default=0)
    above = most + step if fails is None else fails
    narrow = max(fits // part // step * step, step)
    if above - fits <= narrow:
        return 0
    middle = 2 * fits if fails is None else (fits + fails) // 2
    aim = _aim(peaks, cap) or middle
    if fails is not None and aim >= fails:  # the line is wrong: what fails is not on it
        aim = middle
    # A line through two peaks is no more than a guess: never beyond four times what ran, nor outside of the bracket.
    aim = min(aim, 4 * fits) if fits else aim
    return min(max(aim // step * step, fits + narrow), above - step if fails is None else above - narrow)


def _aim(peaks: dict[int, int], cap: int) -> int | None:
    """The length at which the line through the two longest lengths' peaks reaches the cap."""
    if len(peaks) < 2:
        return None
    shorter, longer = sorted(peaks)[-2:]
    slope = (peaks[longer] - peaks[shorter]) / (longer - shorter)
    return int(longer + (FILLED * cap - peaks[longer]) / slope) if slope > 0 else None


@contextlib.contextmanager
def capped(device: torch.device, nbytes: int) -> Iterator[None]:
    """torch's allocator may take so many bytes of the device, until the context ends."""
    total = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(nbytes / total, 1.0), device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)


def longest(
    setup: Setup,
    shape: Callable[[int], GPTConfig],
    ways: Sequence[Way],
    *,
    cap: int,
    most: int,
    seconds: float,
    written: Callable[[list[dict[str, Any]]], Any] = lambda rows: None,
) -> list[dict[str, Any]]:
    """A row for each way, in their order; the time that is left is shared evenly among those still to come."""
    rows: list[dict[str, Any]] = []
    end, first = time.monotonic() + seconds, 8 * STEP_TOKENS
    print(f"\n{setup.model} under {format_bytes(cap)} of device memory: the longest sequence that trains", flush=True)
    for place, way in enumerate(ways):
        begin = time.monotonic()
        share = max(end - begin, 0.0) / (len(ways) - place)
        found = bisect(
            lambda length, way=way: _tried(setup, shape(length), way, cap),  # type: ignore[misc]
            cap=cap,
            first=min(first, most),
            most=most,
            deadline=begin + share,
        )
        rows.append({"way": way.name, "at": now(), "seconds": time.monotonic() - begin, **dataclasses.asdict(found)})
        print(f"  {way.name:24} {_line(found, most)}", flush=True)
        written(rows)
    return rows


def _line(found: Found, most: int) -> str:
    if not found.fits:
        return found.why or "no time was left"
    peak = f"{found.fits:9} tokens, peak {format_bytes(found.peak_bytes)}, {found.tries} tries"
    if found.fits >= most // STEP_TOKENS * STEP_TOKENS:
        return f"{peak}; longer was not asked for"
    return peak if found.complete else f"{peak}; at least, the time was over"


def _tried(setup: Setup, config: GPTConfig, way: Way, cap: int) -> int | str:
    """The peak of one step, or why there is none; nothing of it is held afterwards."""
    with capped(setup.device, cap):
        found = guarded(lambda: _peak(setup, config, way))
        release_memory()
    assert isinstance(found, int | str)
    return found


def _peak(setup: Setup, config: GPTConfig, way: Way) -> int:
    model, ids = setup.make(config)
    with way.start(model) as running:
        # The first step tries recomputes out, which takes more than a step does, and counts as well.
        return train_step(model, ids, running).peak_bytes
