"""Everything that the device holds over time, as bands of a stack, and the largest holders at one instant.

Owned bytes (weights, gradients, optimizer state) and saved storages are known; the rest is what the measured total has
beyond them. Its least value within a step is there throughout it, `other`: on a CPU the program itself, on a GPU what
memo does not see. What comes on top is `transient`: outputs and workspaces that no backward needs, and what is saved
outside the layers. So the stack is as high as the measured total at every sample.

    transient            measured total - owned - saved - other, of the last sample
    saved, by layer      replayed from the states
    optimizer            as last counted
    gradients
    weights
    other                the least rest within the step

Between two samples the rest stays as it was, and gives way where the stack would rise above both of them: a storage
that is counted as transient when it is made, and as saved a little later, is not counted twice. A trace without samples
has no rest.
"""

from __future__ import annotations

import bisect
import dataclasses
import heapq
from collections.abc import Iterable, Sequence

from memo.events import CounterEvent, Event, Owned, Owner, StepMark, TierName
from memo.trace.tensor_lifetimes import ResidencyChange, TensorLifetime, layer_of, residency_changes

OTHER, TRANSIENT = "other", "transient"
OWNED = {
    Owner.STATES: "weights, gradients, optimizer",
    Owner.WEIGHTS: "weights",
    Owner.GRADIENTS: "gradients",
    Owner.OPTIMIZER: "optimizer state",
}
"""Bands of the owners, from the bottom up."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemoryChange:
    """Change by `delta` bytes of one band at `t`."""

    t: int
    band: str
    delta: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TracedDeviceMemory:
    """What one rank's device held."""

    below: tuple[str, ...]
    """Bands under the saved storages, from the bottom up."""
    layers: tuple[str, ...]
    """Bands of saved storages, by first appearance."""
    above: tuple[str, ...]
    """Bands over them."""
    changes: tuple[MemoryChange, ...]
    """Changes by time; at one instant releases come first."""

    @property
    def bands(self) -> tuple[str, ...]:
        """All bands from the bottom up."""
        return (*self.below, *self.layers, *self.above)

    def peak(self, window: tuple[int, int] | None = None) -> int:
        """The first instant of the largest total within a window of time; None: of the whole trace."""
        first, last = window or (0, self.changes[-1].t if self.changes else 0)
        totals: dict[int, int] = {first: 0}
        total = 0
        for change in self.changes:
            if change.t <= last:
                total += change.delta
                totals[max(change.t, first)] = total  # what the window inherits is there at its start
        return max(totals, key=totals.__getitem__)

    def at(self, t: int) -> dict[str, int]:
        """Returns the bytes of each band that holds any at `t`."""
        held = dict.fromkeys(self.bands, 0)
        for change in self.changes:
            if change.t > t:
                break
            held[change.band] += change.delta
        return {band: nbytes for band, nbytes in held.items() if nbytes}


def device_stack(events: Sequence[Event], lifetimes: Sequence[TensorLifetime]) -> TracedDeviceMemory:
    """Replays everything that the device holds.

    Args:
        events: of one rank, sorted by time.
        lifetimes: the saved storages in them.
    """
    samples = [event for event in events if isinstance(event, CounterEvent) and event.tier is TierName.DEVICE]
    owned = [event for event in events if isinstance(event, Owned) and event.module is None]
    saved = [change for change in residency_changes(lifetimes) if change.tier is TierName.DEVICE]
    layers = tuple(dict.fromkeys(layer_of(lifetimes[change.life].module) for change in saved))
    known = [*_saved_changes(saved, lifetimes), *_owned_changes(owned)]
    known.sort(key=lambda change: (change.t, change.delta))
    begins = [event.t for event in events if isinstance(event, StepMark) and event.phase == "begin"]
    rest = _rest(known, samples, begins)
    changes = sorted([*known, *rest], key=lambda change: (change.t, change.delta))
    there = {change.band for change in changes} - set(layers)
    return TracedDeviceMemory(
        below=tuple(band for band in (OTHER, *OWNED.values()) if band in there),
        layers=layers,
        above=(TRANSIENT,) if TRANSIENT in there else (),
        changes=tuple(changes),
    )


def _saved_changes(saved: Iterable[ResidencyChange], lifetimes: Sequence[TensorLifetime]) -> list[MemoryChange]:
    return [
        MemoryChange(t=change.t, band=layer_of(lifetimes[change.life].module), delta=change.delta) for change in saved
    ]


def _owned_changes(owned: Iterable[Owned]) -> list[MemoryChange]:
    held: dict[Owner, int] = dict.fromkeys(Owner, 0)
    changes = []
    for event in owned:
        delta = event.nbytes - held[event.owner]
        held[event.owner] = event.nbytes
        if delta:
            changes.append(MemoryChange(t=event.t, band=OWNED[event.owner], delta=delta))
    return changes


def _rest(known: Sequence[MemoryChange], samples: Sequence[CounterEvent], begins: Sequence[int]) -> list[MemoryChange]:
    """Changes of `other` and `transient`, from the samples and the known bytes, both sorted by time."""
    if not samples:
        return []
    times = [change.t for change in known]
    totals = []
    total = 0
    for change in known:
        total += change.delta
        totals.append(total)

    def known_at(t: int) -> int:
        index = bisect.bisect_right(times, t)
        return totals[index - 1] if index else 0

    rests = [max(0, sample.nbytes - known_at(sample.t)) for sample in samples]
    least: dict[int, int] = {}
    for sample, rest in zip(samples, rests, strict=True):
        step = bisect.bisect_right(begins, sample.t)
        least[step] = min(least.get(step, rest), rest)
    changes: list[MemoryChange] = []
    held = {OTHER: 0, TRANSIENT: 0}

    def become(t: int, rest: int) -> None:
        other = min(rest, base)
        for band, nbytes in ((OTHER, other), (TRANSIENT, rest - other)):
            if nbytes != held[band]:
                changes.append(MemoryChange(t=t, band=band, delta=nbytes - held[band]))
                held[band] = nbytes

    for number, (sample, rest) in enumerate(zip(samples, rests, strict=True)):
        base = least[bisect.bisect_right(begins, sample.t)]
        become(sample.t, rest)
        following = samples[number + 1] if number + 1 < len(samples) else None
        if following is None or following.t == sample.t:
            continue
        highest = max(sample.nbytes, following.nbytes)
        first, last = bisect.bisect_right(times, sample.t), bisect.bisect_left(times, following.t)
        for index in range(first, last):
            if index + 1 == len(times) or times[index + 1] > times[index]:
                become(times[index], min(rest, max(0, highest - totals[index])))
    return changes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Holder:
    """A tensor, or a group of bytes, that holds memory at one instant."""

    what: str
    """`saved`, or the band of a group or of one tensor of it."""
    name: str
    """Layer or parameter; empty for a whole band."""
    nbytes: int
    op: str | None = None
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    line: str | None = None


def largest_holders(
    events: Sequence[Event], lifetimes: Sequence[TensorLifetime], memory: TracedDeviceMemory, t: int, *, count: int = 10
) -> list[Holder]:
    """Lists what holds most of the device at `t`, the largest first.

    Saved storages and named tensors are listed one by one. A band's bytes that no named tensor has are one group.

    Args:
        events: of one rank.
        lifetimes: the saved storages in them.
        memory: of these.
        t: the instant.
        count: the most rows.
    """
    held = memory.at(t)
    found = [
        Holder(
            what="saved",
            name=life.module,
            nbytes=nbytes,
            op=life.named.op,
            shape=life.named.shape,
            dtype=life.named.dtype,
            line=life.named.line,
        )
        for life, nbytes in _resident(lifetimes, t)
    ]
    named: dict[tuple[str, str], Owned] = {}
    for event in events:
        if isinstance(event, Owned) and event.module is not None:
            named[OWNED[event.owner], event.module] = event
    for band in (*memory.below, *memory.above):
        rest = held.get(band, 0)
        for (owner, name), event in named.items():
            if owner == band and event.nbytes <= rest:
                rest -= event.nbytes
                found.append(Holder(what=band, name=name, nbytes=event.nbytes, shape=event.shape, dtype=event.dtype))
        if rest:
            name = "smaller tensors" if rest < held[band] else ""
            found.append(Holder(what=band, name=name, nbytes=rest))
    return heapq.nlargest(count, found, key=lambda one: one.nbytes)


def _resident(lifetimes: Sequence[TensorLifetime], t: int) -> Iterable[tuple[TensorLifetime, int]]:
    """Lifetimes with bytes on the device at `t`."""
    held: dict[int, int] = {}
    for change in residency_changes(lifetimes):
        if change.t > t:
            break
        if change.tier is TierName.DEVICE:
            held[change.life] = held.get(change.life, 0) + change.delta
    return [(lifetimes[number], nbytes) for number, nbytes in held.items() if nbytes]
