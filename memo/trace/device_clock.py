"""Events of the host on the device's clock: the host runs ahead of a GPU by up to a step, and memory follows compute.

A layer's span has the times at which the device ran it, and those at which the host had issued its begin and its end.
Between two such pairs the host's events (states of storages, memory, uses, notes, marks) move in proportion.
Memory that is freed as the host goes on is used again by work behind it on the stream, so it is held until then.

    host      |f0|f1|b1|b0|                 |f0|f1|...
    device      |--- f0 ---|--- f1 ---|--- b1 ---|--- b0 ---|
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable

from memo.events import CounterEvent, Event, Note, Owned, Span, StateChange, StepMark, StorageUse

_OF_HOST = (StateChange, StorageUse, CounterEvent, Owned, Note, StepMark)


def on_device_clock(events: Iterable[Event], spans: Iterable[Event] | None = None) -> list[Event]:
    """Events sorted by the device's time; where no span says when it was issued, by their own.

    Args:
        events: some or all events of a trace.
        spans: events among which all spans of the trace are; None: `events`.
    """
    events = list(events)
    pairs = [(0, 0)]
    for event in events if spans is None else spans:
        if isinstance(event, Span) and event.issued is not None:
            pairs += [(event.issued, event.t), (event.issued + (event.issued_d or 0), event.t + event.d)]
    if len(pairs) > 1:
        pairs.sort()
        host = [issued for issued, _ in pairs]
        latest, device = 0, []
        for _, ran in pairs:
            latest = max(latest, ran)
            device.append(latest)
        events = [
            dataclasses.replace(event, t=_mapped(event.t, host, device)) if isinstance(event, _OF_HOST) else event
            for event in events
        ]
    return sorted(events, key=lambda event: event.t)


def _mapped(t: int, host: list[int], device: list[int]) -> int:
    """Time of the device at which the host was at `t`; behind the last pair the host's own, once the device is idle."""
    after = bisect.bisect_right(host, t)
    if after == len(host):
        return max(t, device[-1])
    before = after - 1
    share = (t - host[before]) / (host[after] - host[before])
    return round(device[before] + share * (device[after] - device[before]))
