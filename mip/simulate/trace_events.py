"""Trace events of a simulation, in the format of a run's trace, so that every trace command reads them.

Owns the translation alone: seconds become nanoseconds since the step began, and each part of a call's saved bytes
becomes one storage. Two differences from a run: a storage is a whole part of a layer, not one tensor of it; and
recomputed bytes are gone while they are not on the device, where a run counts the tensor whose tail they are.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

from memo.events import (
    CounterEvent,
    Event,
    Owned,
    Owner,
    Span,
    Stall,
    StateChange,
    StepMark,
    StorageUse,
    TensorState,
    TierName,
)
from memo.mip.simulate.links import Copy
from memo.mip.simulate.result import Occupancy, Part, StageSimulation, Wait

_NAMES = {Part.KEPT: "kept", Part.HOST: "host", Part.DISK: "disk", Part.RECOMPUTED: "recomputed"}
_TIERS = {Part.HOST: TierName.HOST, Part.DISK: TierName.DISK}
_IN_DISK_OR_HOST = (TensorState.LEAVING, TensorState.AWAY, TensorState.RETURNING, TensorState.BACK)


def stage_events(stage: StageSimulation, *, end_s: float, step: int = 0) -> tuple[Event, ...]:
    """Converts a stage's simulation to the trace events of one rank, in order of time.

    Args:
        stage: the simulated stage.
        end_s: end of the step on all ranks.
        step: number of the step in the trace.
    """
    found: list[Event] = [
        *_states(stage, step),
        *_spans(stage, step),
        *(_stall(wait, step) for wait in stage.waits),
        *(
            StorageUse(t=_ns(usage.t_s), step=step, id=_ident(usage.call, usage.part), how=usage.how)
            for usage in stage.usages
        ),
        *_counters(stage.occupancies, step),
    ]
    found.sort(key=operator.attrgetter("t"))  # stable: transitions at one instant stay in order
    begin = StepMark(t=0, step=step, phase="begin")
    static = Owned(t=0, step=step, owner=Owner.STATES, nbytes=stage.static_nbytes)
    return (begin, static, *found, StepMark(t=_ns(end_s), step=step, phase="end"))


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)


def _ident(call: int, part: Part) -> int:
    return call * len(Part) + part


def _states(stage: StageSimulation, step: int) -> Iterator[StateChange]:
    for change in stage.transitions:
        yield StateChange(
            t=_ns(change.t_s),
            step=step,
            id=_ident(change.call, change.part),
            to=change.to,
            nbytes=change.nbytes,
            tier=_TIERS.get(change.part) if change.to in _IN_DISK_OR_HOST else None,
            module=f"{change.module}.{_NAMES[change.part]}" if change.to is TensorState.LIVE else None,
        )


def _spans(stage: StageSimulation, step: int) -> Iterator[Span]:
    for work in stage.spans:
        start, end = _ns(work.start_s), _ns(work.end_s)
        yield Span(t=start, d=end - start, step=step, lane=work.lane, module=work.module, phase=work.phase)
    for copy in stage.copies:
        yield from _copy_spans(copy, step)


def _copy_spans(copy: Copy, step: int) -> Iterator[Span]:
    start, end = _ns(copy.start_s), _ns(copy.end_s)
    part = Part.DISK if copy.queue.disk else Part.HOST
    decoded = copy.decoded_nbytes if copy.decoded_nbytes > copy.nbytes else None
    for lane in copy.queue.lanes:
        yield Span(
            t=start,
            d=end - start,
            step=step,
            lane=lane,
            id=_ident(copy.call, part),
            nbytes=copy.nbytes,
            decoded_nbytes=decoded,
        )


def _stall(wait: Wait, step: int) -> Stall:
    start, end = _ns(wait.start_s), _ns(wait.end_s)
    return Stall(t=start, d=end - start, step=step, cause=wait.cause, module=wait.module)


def _counters(occupancies: tuple[Occupancy, ...], step: int) -> Iterator[CounterEvent]:
    """Bytes in each tier after the last change of an instant."""
    last: dict[tuple[int, TierName], int] = {}
    for occupancy in occupancies:
        last[_ns(occupancy.t_s), occupancy.tier] = occupancy.nbytes
    for (t, tier), nbytes in last.items():
        yield CounterEvent(t=t, step=step, tier=tier, nbytes=nbytes)
