"""Lifetimes of saved storages, from the events that name their ids, and the bytes that each holds in every tier.

A trace is a stream of state changes. `lifetimes_of` groups them by id (an id seen again after it was gone begins a new
lifetime); `residency_changes` replays the states into changes of bytes per tier, from which every peak and memory chart
is made. Both accept incomplete traces: a ring that dropped events must not stop the report.

    state      live  leaving        away          returning      back           gone
    device     n     n              0             n              n              0
    lower tier 0     n (its tier)   n (its tier)  n (as before)  n (as before)  0
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterable, Iterator, Sequence

from memo.events import Event, Lane, Span, Stall, StateChange, StorageUse, TensorState, TierName

_LAYER = re.compile(r"(?:.*?\.)?\d+(?=\.|$)")
_TIERS = tuple(TierName)  # iterating an Enum class is ten times slower
_UNNAMED = StateChange(t=0, step=0, id=-1, to=TensorState.GONE, nbytes=0)
_ON_DEVICE = (TensorState.LIVE, TensorState.RETURNING, TensorState.BACK)


@dataclasses.dataclass
class TensorLifetime:
    """One storage from its save to its release, as far as the trace has it."""

    id: int
    states: list[StateChange] = dataclasses.field(default_factory=list)
    uses: list[StorageUse] = dataclasses.field(default_factory=list)
    moves: list[Span] = dataclasses.field(default_factory=list)
    """Its copies in all lanes, by start."""
    stalls: list[Stall] = dataclasses.field(default_factory=list)

    @functools.cached_property
    def step(self) -> int:
        """The first step with an event of it."""
        events: list[StateChange | StorageUse | Span | Stall] = [*self.states, *self.uses, *self.moves, *self.stalls]
        return min(event.step for event in events)

    @functools.cached_property
    def named(self) -> StateChange:
        """The state that says what it is: module, shape and dtype, operation and Python lines; all None where none does."""
        return next((state for state in self.states if state.module is not None), _UNNAMED)

    @property
    def module(self) -> str:
        """The module that saved it; empty where not known."""
        return self.named.module or ""

    @functools.cached_property
    def nbytes(self) -> int:
        """Bytes of its largest state or copy."""
        return max([state.nbytes for state in self.states] + [move.nbytes or 0 for move in self.moves], default=0)

    @property
    def start_ns(self) -> int:
        """Time of the first event."""
        points: list[StateChange | StorageUse | Span | Stall] = [*self.states[:1], *self.uses[:1]]
        return min(event.t for event in (*points, *self.moves[:1], *self.stalls[:1]))

    @property
    def end_ns(self) -> int:
        """Time at which the last event ended."""
        points: list[StateChange | StorageUse] = [*self.states[-1:], *self.uses[-1:]]
        spans: list[Span | Stall] = [*self.moves[-1:], *self.stalls[-1:]]
        return max([event.t for event in points] + [span.t + span.d for span in spans])

    @property
    def tier(self) -> TierName:
        """The lowest tier that it reached."""
        lanes = {move.lane for move in self.moves}
        seen = {state.tier for state in self.states}
        if TierName.DISK in seen or Lane.DISK_WRITE in lanes:
            return TierName.DISK
        return TierName.HOST if TierName.HOST in seen or Lane.D2H in lanes else TierName.DEVICE


def lifetimes_of(events: Iterable[Event]) -> list[TensorLifetime]:
    """Collects the lifetimes in events sorted by time, in order of their first events."""
    open_lives: dict[int, TensorLifetime] = {}
    found = []
    for event in events:
        key = getattr(event, "id", None)
        if key is None:
            continue
        life = open_lives.get(key)
        if life is None or (isinstance(event, StateChange) and life.states and life.states[-1].to is TensorState.GONE):
            life = open_lives[key] = TensorLifetime(key)
            found.append(life)
        if isinstance(event, StateChange):
            life.states.append(event)
        elif isinstance(event, StorageUse):
            life.uses.append(event)
        elif isinstance(event, Span):
            life.moves.append(event)
        elif isinstance(event, Stall):
            life.stalls.append(event)
    return found


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ResidencyChange:
    """Change by `delta` bytes of lifetime number `life` in `tier`, at `t`."""

    t: int
    tier: TierName
    delta: int
    life: int


def residency_changes(lifetimes: Sequence[TensorLifetime]) -> list[ResidencyChange]:
    """Lists every change of bytes in a tier by time; at one instant releases come before allocations."""
    changes = [holding for number, life in enumerate(lifetimes) for holding in _replay(number, life)]
    changes.sort(key=lambda holding: (holding.t, holding.delta))
    return changes


def _replay(number: int, life: TensorLifetime) -> Iterator[ResidencyChange]:
    held = dict.fromkeys(_TIERS, 0)
    lower: TierName | None = None  # of one that is recomputed whole
    for state in life.states:
        if state.tier in (TierName.HOST, TierName.DISK):
            lower = state.tier
        wanted = dict.fromkeys(_TIERS, 0)
        if state.to in _ON_DEVICE:
            wanted[TierName.DEVICE] = state.nbytes
        elif state.to is TensorState.LEAVING:
            wanted[TierName.DEVICE] = held[TierName.DEVICE] or state.nbytes
        if lower is not None and state.to in (TensorState.LEAVING, TensorState.AWAY):
            wanted[lower] = state.nbytes
        elif state.to in (TensorState.RETURNING, TensorState.BACK):
            # The engine frees the place in the lower tier with the last handle.
            wanted[TierName.HOST], wanted[TierName.DISK] = held[TierName.HOST], held[TierName.DISK]
        for tier in _TIERS:
            if wanted[tier] != held[tier]:
                yield ResidencyChange(t=state.t, tier=tier, delta=wanted[tier] - held[tier], life=number)
        held = wanted


def layer_of(module: str) -> str:
    """Returns the layer of a module: `model.layers.4` of `model.layers.4.mlp.up`; the name itself without a number."""
    found = _LAYER.match(module)
    return found[0] if found else module
