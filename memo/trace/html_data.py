"""Data of the HTML report, as columns that `memo.trace.html` embeds and the viewer turns into typed arrays.

A column is a list of integers; names are indices into one list of strings; `t` columns hold differences from the value
before, which are short. Times are nanoseconds on one axis for all ranks, from the earliest rank's origin.

A page draws at most MAX_ITEMS items. Beyond that it is thinned, and `thinned` says how: neighbouring spans of a lane
that are shorter than a quantum become one block, the lifetimes with the fewest bytes × time are left out, and bytes in
a tier change once a quantum. Stalls are thinned last, and the figures never come from here.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from memo.events import (
    CounterEvent,
    Lane,
    Note,
    Owned,
    Span,
    Stall,
    StallCause,
    StateChange,
    TensorState,
    TierName,
    UseKind,
)
from memo.trace.device_memory import OWNED, device_stack
from memo.trace.format import without_folders
from memo.trace.intervals import pack_rows
from memo.trace.report import RankReport, TraceReport
from memo.trace.stats import COPY_LANES, issue_times, queued_bytes
from memo.trace.tensor_lifetimes import TensorLifetime, layer_of, residency_changes

FORMAT = "memo-trace-page"
VERSION = 1
MAX_ITEMS = 400_000
PHASES = ("", "forward", "backward", "optimizer")
_NONE = -1
_LANES, _CAUSES, _STATES, _USES, _TIERS = (
    {member: place for place, member in enumerate(members)}
    for members in (Lane, StallCause, TensorState, UseKind, TierName)
)


def page_data(report: TraceReport, *, max_items: int = MAX_ITEMS) -> dict[str, Any]:
    """Builds the viewer's data, ready for json.

    Args:
        report: of the run.
        max_items: number of items that the page draws, over all ranks.
    """
    names = _Names()
    origin = min((one.trace.origin_unix_ns for one in report.ranks), default=0)
    share = max(max_items // max(len(report.ranks), 1), 1000)
    return {
        "format": FORMAT,
        "version": VERSION,
        "lanes": [lane.value for lane in Lane],
        "phases": list(PHASES),
        "causes": [cause.value for cause in StallCause],
        "states": [state.value for state in TensorState],
        "tiers": [tier.value for tier in TierName],
        "uses": [use.value for use in UseKind],
        "origin_unix_ns": str(origin),  # beyond 2**53, so no number in JavaScript
        "meta": without_folders(report.of_rank(report.rank).trace.meta),  # a page is sent to others
        "stats": without_folders(report.to_json()),
        "ranks": [_RankColumns(one, names, origin, share).to_json() for one in report.ranks],
        "names": names.strings,
    }


class _Names:
    """Table of strings, each stored once and named by its index."""

    def __init__(self) -> None:
        self.strings: list[str] = [""]
        self._index = {"": 0}

    def __call__(self, name: str | None) -> int:
        name = name or ""
        if name not in self._index:
            self._index[name] = len(self.strings)
            self.strings.append(name)
        return self._index[name]


class _RankColumns:
    """One rank's columns, thinned to about `room` items."""

    def __init__(self, one: RankReport, names: _Names, origin: int, room: int) -> None:
        self._one = one
        self._names = names
        self._shift = one.trace.origin_unix_ns - origin
        events = one.trace.events
        self._spans = [event for event in events if isinstance(event, Span)]
        self._stalls = [event for event in events if isinstance(event, Stall)]
        self._counters = [event for event in events if isinstance(event, CounterEvent)]
        self._notes = [event for event in events if isinstance(event, Note)][:1000]
        self._lives = list(one.lifetimes)
        self._changes = residency_changes(self._lives)
        self._device = device_stack(events, self._lives)
        self._owned = [event for event in events if isinstance(event, Owned) and event.module is not None]
        self._quantum = 0
        self._thin(room)
        self._by_id = self._numbers_by_id()

    def _thin(self, room: int) -> None:
        self._kept = self._lives
        wanted = [len(self._spans), len(self._changes), len(self._counters), len(self._stalls)]
        items = sum(wanted) + sum(len(life.states) + len(life.uses) for life in self._lives)
        self._thinned: str | None = None
        if items <= room:
            return
        self._kept = _weightiest(self._lives, room // 4)
        whole = max((event.t for event in self._one.trace.events), default=1)
        self._quantum = max(whole // (room // 32), 1)  # about 8 rows, changes and counters share the room
        said = [f"blocks of under {self._quantum / 1e3:,.0f} µs are merged with their neighbours"]
        if len(self._kept) < len(self._lives):
            said.append(f"{len(self._kept):,} of {len(self._lives):,} tensors can be selected")
        if len(self._stalls) > room // 8:
            self._stalls = sorted(self._stalls, key=lambda stall: -stall.d)[: room // 8]
            self._stalls.sort(key=lambda stall: stall.t)
            said.append(f"the {len(self._stalls):,} longest stalls are drawn")
        self._thinned = f"Rank {self._one.trace.rank} is thinned for drawing: {', '.join(said)}. The figures are exact."

    def to_json(self) -> dict[str, Any]:
        return {
            "rank": self._one.trace.rank,
            "shift_ns": self._shift,
            "thinned": self._thinned,
            "rows": [self._row(lane, row, spans) for lane, row, spans in self._rows()],
            "lives": self._life_columns(),
            "stalls": self._stall_columns(),
            "tiers": [self._tier_columns(tier) for tier in TierName],
            "queues": self._queue_columns(),
            "owned": self._owned_columns(),
            "notes": [
                {
                    "t": note.t + self._shift,
                    "step": note.step,
                    "cause": note.cause,
                    "message": without_folders(note.message),
                }
                for note in self._notes
            ],
        }

    def _rows(self) -> Iterator[tuple[Lane, int, list[Span]]]:
        """Each lane as rows without overlap."""
        for lane in Lane:
            spans = [span for span in self._spans if span.lane is lane]
            rows: dict[int, list[Span]] = collections.defaultdict(list)
            for span, row in zip(spans, pack_rows([(span.t, span.t + span.d) for span in spans]), strict=True):
                rows[row].append(span)
            for row in sorted(rows):
                yield lane, row, rows[row]

    def _row(self, lane: Lane, row: int, spans: Sequence[Span]) -> dict[str, Any]:
        by_id = self._by_id
        blocks = [list(block) for block in _merged(spans, self._quantum)]
        first = [block[0] for block in blocks]
        single = [block[0] if len(block) == 1 else None for block in blocks]
        lifetimes = [by_id.get(span.id, ()) if span and span.id is not None else () for span in single]
        return {
            "lane": _LANES[lane],
            "row": row,
            "t": self._times(span.t for span in first),
            "d": [max(span.t + span.d for span in block) - block[0].t for block in blocks],
            "phase": [_phase(span.phase) for span in first],
            "name": [self._names(span.module) if span else 0 for span in single],
            "nbytes": [sum(span.nbytes or 0 for span in block) for block in blocks],
            "life": [_living(found, span.t) for found, span in zip(lifetimes, first, strict=True)],
            "merged": [len(block) for block in blocks] if self._quantum else [],
        }

    def _numbers_by_id(self) -> dict[int, list[tuple[int, int]]]:
        """(start, number) of the kept lifetimes of each id."""
        found: dict[int, list[tuple[int, int]]] = collections.defaultdict(list)
        for number, life in enumerate(self._kept):
            found[life.id].append((life.start_ns, number))
        return found

    def _life_columns(self) -> dict[str, Any]:
        lifetimes = self._kept
        states = [state for life in lifetimes for state in life.states]
        uses = [use for life in lifetimes for use in life.uses]
        return {
            "id": [life.id for life in lifetimes],
            "step": [life.step for life in lifetimes],
            "name": [self._names(life.module) for life in lifetimes],
            "nbytes": [life.nbytes for life in lifetimes],
            "shape": [self._names(_shape(life.named)) for life in lifetimes],
            "op": [self._names(life.named.op) for life in lifetimes],
            "line": [self._names(life.named.line) for life in lifetimes],
            "tier": [_TIERS[life.tier] for life in lifetimes],
            "start": self._times(life.start_ns for life in lifetimes),
            "end": self._times(life.end_ns for life in lifetimes),
            "states": [len(life.states) for life in lifetimes],
            "state_t": self._times(state.t for state in states),
            "state_to": [_STATES[state.to] for state in states],
            "state_tier": [_NONE if state.tier is None else _TIERS[state.tier] for state in states],
            "uses": [len(life.uses) for life in lifetimes],
            "use_t": self._times(use.t for use in uses),
            "use_how": [_USES[use.how] for use in uses],
        }

    def _stall_columns(self) -> dict[str, Any]:
        by_id = self._by_id
        return {
            "t": self._times(stall.t for stall in self._stalls),
            "d": [stall.d for stall in self._stalls],
            "step": [stall.step for stall in self._stalls],
            "cause": [_CAUSES[stall.cause] for stall in self._stalls],
            "name": [self._names(stall.module) for stall in self._stalls],
            "life": [_living(by_id.get(_NONE if s.id is None else s.id, ()), s.t) for s in self._stalls],
        }

    def _tier_columns(self, tier: TierName) -> dict[str, Any]:
        of_device = tier is TierName.DEVICE
        if of_device:
            changes = [(change.t, self._names(change.band), change.delta) for change in self._device.changes]
        else:
            changes = [
                (change.t, self._names(layer_of(self._lives[change.life].module)), change.delta)
                for change in self._changes
                if change.tier is tier
            ]
        counters = [(counter.t, counter.nbytes) for counter in self._counters if counter.tier is tier]
        if self._quantum:
            changes = list(_summed(changes, self._quantum))
            counters = list(_highest(counters, self._quantum))
        return {
            "t": self._times(t for t, _, _ in changes),
            "layer": [layer for _, layer, _ in changes],
            "delta": [delta for _, _, delta in changes],
            "below": [self._names(band) for band in self._device.below] if of_device else [],
            "above": [self._names(band) for band in self._device.above] if of_device else [],
            "counter_t": self._times(t for t, _ in counters),
            "counter_nbytes": [nbytes for _, nbytes in counters],
        }

    def _queue_columns(self) -> list[dict[str, Any]]:
        """Bytes of each lane whose copies were issued and had not ended, from each time on."""
        issued, found = issue_times(self._one.trace.events), []
        for lane in COPY_LANES:
            queue = queued_bytes(lane, (span for span in self._spans if span.lane is lane), issued)
            if self._quantum:
                queue = list(_highest(queue, self._quantum))
            columns = {"t": self._times(t for t, _ in queue), "nbytes": [nbytes for _, nbytes in queue]}
            found.append({"lane": _LANES[lane], **columns})
        return found

    def _owned_columns(self) -> dict[str, Any]:
        """The largest tensors of each owner, once each, as last seen."""
        named = {(event.owner, event.module): event for event in self._owned}.values()
        return {
            "band": [self._names(OWNED[event.owner]) for event in named],
            "name": [self._names(event.module) for event in named],
            "nbytes": [event.nbytes for event in named],
            "shape": [self._names(_shape(event)) for event in named],
        }

    def _times(self, times: Iterable[int]) -> list[int]:
        """Differences of each time from the one before; of the first one from the common origin."""
        shifted = [t + self._shift for t in times]
        return [t - before for t, before in zip(shifted, itertools.chain((0,), shifted), strict=False)]


def _phase(phase: str | None) -> int:
    return PHASES.index(phase) if phase in PHASES else 0


def _shape(named: StateChange | Owned) -> str:
    shape = "×".join(map(str, named.shape)) if named.shape is not None else ""
    return f"{shape} {named.dtype or ''}".strip()


def _living(found: Sequence[tuple[int, int]], t: int) -> int:
    """Number of the last of an id's lifetimes that had begun by `t`."""
    begun = [number for start, number in found if start <= t]
    return begun[-1] if begun else _NONE


def _weightiest(lifetimes: Sequence[TensorLifetime], count: int) -> list[TensorLifetime]:
    """Lifetimes to keep when thinning: stalled ones first, then by bytes × time; in their old order."""

    def weight(life: TensorLifetime) -> tuple[int, int]:
        return sum(stall.d for stall in life.stalls), life.nbytes * (life.end_ns - life.start_ns)

    afforded, room = [], count
    for life in sorted(lifetimes, key=weight, reverse=True):
        room -= len(life.states) + len(life.uses) + 1
        if room < 0:
            break
        afforded.append(life)
    chosen = {id(life) for life in afforded}
    return [life for life in lifetimes if id(life) in chosen]


def _merged(spans: Sequence[Span], quantum: int) -> Iterator[Iterable[Span]]:
    """Runs of neighbours within one quantum and of one phase; single spans when quantum is 0."""
    run: list[Span] = []
    for span in spans:
        joins = run and span.t + span.d - run[0].t <= quantum and span.phase == run[0].phase
        if run and not joins:
            yield run
            run = []
        run.append(span)
    if run:
        yield run


def _summed(changes: Sequence[tuple[int, int, int]], quantum: int) -> Iterator[tuple[int, int, int]]:
    """Sums the changes of one layer within one quantum."""
    for bucket, group in itertools.groupby(changes, key=lambda change: change[0] // quantum):
        sums: dict[int, int] = collections.defaultdict(int)
        for _, layer, delta in group:
            sums[layer] += delta
        yield from ((bucket * quantum, layer, delta) for layer, delta in sums.items() if delta)


def _highest(counters: Sequence[tuple[int, int]], quantum: int) -> Iterator[tuple[int, int]]:
    """The highest value within each quantum, and the last one."""
    for bucket, group in itertools.groupby(counters, key=lambda counter: counter[0] // quantum):
        values = [nbytes for _, nbytes in group]
        yield bucket * quantum, max(values)
        if values[-1] < max(values):
            yield (bucket + 1) * quantum - 1, values[-1]
