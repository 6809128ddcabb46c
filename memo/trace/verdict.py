"""Verdict on a trace in a few plain sentences, each by one named rule that docs/verdict.md documents.

A rule is a function from the evidence of one step to a sentence or None; RULES lists them in the order of the output.
Rules state only what is in the trace, and every advice comes with the arithmetic behind it.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import re
import statistics
from collections.abc import Callable, Sequence

from memo.events import PLAN_MADE, Event, Lane, Note, Span, Stall, StallCause, TensorState
from memo.trace.figures import LaneStats, RankStats, StepStats, TierPeak
from memo.trace.format import duration, percent, printable, rate
from memo.trace.intervals import length, subtraction, union
from memo.trace.reader import Trace
from memo.trace.tensor_lifetimes import TensorLifetime, layer_of
from memo.units import format_bytes

SLOW_LINK = 0.75
"""Fraction of its measured link below which a lane is called slow."""
TIGHT = 0.95
"""Fraction of a budget above which it is called tight."""
NOTABLE = 0.001
"""Fraction of the step below which a time is not mentioned."""
UNEVEN = 1.03
"""Ratio of the slowest rank to the median from which ranks are called uneven."""
OUTLYING, LIKE = 3.0, 4
"""Ratio of a span to the median of its like from which it is called outlying, and how many of its like there must be."""
WEIGHTY = 0.05
"""Fraction of the step that an outlying span must add."""

_LANE_NAMES = {Lane.D2H: "D2H", Lane.H2D: "H2D", Lane.DISK_WRITE: "NVMe write", Lane.DISK_READ: "NVMe read"}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sentence:
    """One sentence of a verdict, with the name of its rule."""

    rule: str
    text: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Input of the rules: one step of one rank, its events and lifetimes, and the figures of all ranks."""

    trace: Trace
    stats: StepStats
    events: Sequence[Event]
    lifetimes: Sequence[TensorLifetime]
    others: Sequence[RankStats] = ()
    plain_ns: int | None = None
    """Measured time of the same step without memo."""

    @property
    def is_simulated(self) -> bool:
        """Whether the trace was computed and not measured."""
        return self.trace.meta.get("simulated") is True

    @property
    def limits(self) -> str | None:
        """What limits the plan that a solver made for this step; None without one."""
        plan = self.trace.meta.get("plan")
        if isinstance(plan, dict) and isinstance(plan.get("limits"), str):
            return str(plan["limits"])
        until = self.stats.end_ns
        said = [
            event
            for event in self.trace.events
            if isinstance(event, Note) and event.cause == PLAN_MADE and event.t <= until
        ]
        return said[-1].message if said else None

    def lane(self, lane: Lane) -> LaneStats:
        """Figures of one copy lane."""
        return next(one for one in self.stats.lanes if one.lane is lane)

    def waited_ns(self, *causes: StallCause) -> int:
        """Total stall time of these causes."""
        return sum(one.total_ns for one in self.stats.stalls if one.cause in causes)

    def notable(self, ns: int) -> bool:
        """Whether a time is long enough to be mentioned."""
        return ns > 0 and ns >= NOTABLE * self.stats.duration_ns


def verdict(evidence: Evidence) -> tuple[Sentence, ...]:
    """Applies all rules; returns their sentences in order."""
    said = ((name, rule(evidence)) for name, rule in RULES.items())
    return tuple(Sentence(rule=name, text=text) for name, text in said if text is not None)


def _step_time(evidence: Evidence) -> str | None:
    stats, simulated = evidence.stats, evidence.is_simulated
    took = "is predicted to take" if simulated else "took"
    what = "The trace covers" if stats.step is None else f"Step {stats.step} {took}"
    said = f"{what} {duration(stats.duration_ns)}{_than_plain(evidence)}"
    if stats.added_ns == 0:
        nothing = (
            "waits for no copy and recomputes nothing" if simulated else "waited for no copy and recomputed nothing"
        )
        return f"{said}; it {nothing}.{_unexplained(evidence)}"
    parts = []
    if stats.stall_ns:
        parts.append(f"{'waits' if simulated else 'waited'} {duration(stats.stall_ns)} for copies")
    if stats.recompute_ns:
        parts.append(f"{'recomputes' if simulated else 'recomputed'} for {duration(stats.recompute_ns)}")
    return f"{said}; it {' and '.join(parts)}.{_unexplained(evidence)}"


def _than_plain(evidence: Evidence) -> str:
    """Comparison with the step without memo, where that was measured."""
    plain, took = evidence.plain_ns, evidence.stats.duration_ns
    if not plain or evidence.stats.step is None:
        return ""
    if took < plain:  # memo makes nothing faster
        return f", within the noise of the {duration(plain)} measured without memo"
    return f", {percent(100 * (took / plain - 1))} longer than the {duration(plain)} measured without memo"


def _unexplained(evidence: Evidence) -> str:
    """Sentence on a step that took longer than without memo by more than twice its waits and recompute."""
    plain, stats = evidence.plain_ns, evidence.stats
    longer = stats.duration_ns - (plain or stats.duration_ns)
    if stats.step is None or stats.added_ns * 2 >= longer:
        return ""
    part = duration(stats.added_ns) if stats.added_ns else "none"
    return (
        f" Waits and recompute explain {part} of the {duration(longer)} more; the trace does not show the reason of the "
        "rest, such as other programs or memory touched for the first time."
    )


def _outlier(evidence: Evidence) -> str | None:
    """A layer's pass that took far longer than those of its like, without its waits for copies."""
    waits = union((event.t, event.t + event.d) for event in evidence.events if isinstance(event, Stall))
    like: dict[tuple[str, ...], list[tuple[int, Span]]] = collections.defaultdict(list)
    for event in evidence.events:
        if isinstance(event, Span) and event.module and event.lane in (Lane.COMPUTE, Lane.RECOMPUTE):
            took = length(subtraction([(event.t, event.t + event.d)], waits))
            like[event.lane.value, event.phase or "", _NUMBER.sub("#", event.module)].append((took, event))
    found = []
    for spans in like.values():
        middle = int(statistics.median(took for took, _ in spans))
        took, span = max(spans, key=lambda one: one[0])
        if len(spans) >= LIKE and middle and took > OUTLYING * middle:
            found.append((took - middle, took, middle, span))
    if not found:
        return None
    added, took, middle, span = max(found, key=lambda one: one[0])
    if added < WEIGHTY * evidence.stats.duration_ns:
        return None
    work = "recompute" if span.lane is Lane.RECOMPUTE else span.phase or "pass"
    said = f"{printable(span.module or '')}'s {work} took {duration(took)}, {took / middle:.1f} times the median of its like"
    if evidence.stats.step is None:
        return f"{said} ({duration(middle)}), in step {span.step}."
    before = [
        event.d
        for event in evidence.trace.events
        if isinstance(event, Span)
        and (event.lane, event.phase, event.module) == (span.lane, span.phase, span.module)
        and event.step != span.step
    ]
    other = f"; in other steps {duration(int(statistics.median(before)))}" if before else ""
    return f"{said} ({duration(middle)}){other}."


_NUMBER = re.compile(r"\d+")


def _plan_limits(evidence: Evidence) -> str | None:
    if evidence.limits is None:
        return None
    tightest, _, more = evidence.limits.partition("; ")
    others = " (and others)" if more else ""
    return f"A solver planned this step. What limits it{others}: {printable(tightest, limit=300)}."


def _declined(evidence: Evidence) -> str | None:
    device, *lower = evidence.stats.peaks
    moved = any(lane.copies for lane in evidence.stats.lanes) or any(peak.saved_nbytes for peak in lower)
    if moved or evidence.stats.recompute_ns or not device.saved_nbytes:
        return None
    saved = format_bytes(device.saved_nbytes)
    return f"Nothing was moved or recomputed: all {saved} of saved activations stayed on the device."


def _copies_out(evidence: Evidence) -> str | None:
    waited = evidence.waited_ns(StallCause.DRAIN, StallCause.HOST_FULL, StallCause.DISK_QUEUE)
    lane = _first_used(evidence, Lane.D2H, Lane.DISK_WRITE)
    return _hiding(lane, "forward", lane.forward_busy_percent, waited) if lane else None


def _copies_in(evidence: Evidence) -> str | None:
    lane = _first_used(evidence, Lane.H2D, Lane.DISK_READ)
    return (
        _hiding(lane, "backward", lane.backward_busy_percent, evidence.waited_ns(StallCause.RELOAD)) if lane else None
    )


def _first_used(evidence: Evidence, *lanes: Lane) -> LaneStats | None:
    """The first of these lanes that has copies: without a host tier, the disk's."""
    return next((found for lane in lanes if (found := evidence.lane(lane)).copies), None)


def _hiding(lane: LaneStats, phase: str, busy_percent: float | None, waited_ns: int) -> str | None:
    if busy_percent is None:
        return None
    ending = f"costs {duration(waited_ns)} of waiting" if waited_ns else "hides fully"
    return f"{_LANE_NAMES[lane.lane]} is busy {percent(busy_percent)} of the {phase} and {ending}."


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Episode:
    """Consecutive stalls of one cause at one layer, counted as one wait."""

    first: Stall
    layer: str
    d: int


def _episodes(evidence: Evidence) -> list[_Episode]:
    modules = {life.id: life.module for life in evidence.lifetimes}
    stalls = [
        event for event in evidence.events if isinstance(event, Stall) and event.cause is not StallCause.COLLECTIVE
    ]

    def place(stall: Stall) -> tuple[StallCause, str]:
        named = stall.module or modules.get(-1 if stall.id is None else stall.id, "")
        return stall.cause, layer_of(named)

    episodes = []
    for (_, layer), group in itertools.groupby(stalls, key=place):
        members = list(group)
        episodes.append(_Episode(first=members[0], layer=layer, d=sum(stall.d for stall in members)))
    return episodes


def _worst_stall(evidence: Evidence) -> str | None:
    worst = max(_episodes(evidence), key=lambda episode: episode.d, default=None)
    if worst is None or not evidence.notable(worst.d):
        return None
    who = printable(worst.layer) if worst.layer else "one storage"
    if worst.first.cause is StallCause.RELOAD:
        return f"{who}'s reload waits {duration(worst.d)} {_why_reload_waits(evidence, worst)}."
    return f"{who} waits {duration(worst.d)} {_WHY[worst.first.cause](evidence)}."


def _why_reload_waits(evidence: Evidence, episode: _Episode) -> str:
    """Cause of a late reload: the prefetch began late if the lane had been idle long enough, else the link is full."""
    stall = episode.first
    life = next((life for life in evidence.lifetimes if life.id == stall.id and life.start_ns <= stall.t), None)
    returns = [state.t for state in life.states if state.to is TensorState.RETURNING] if life else []
    copies = [span for span in life.moves if span.lane in (Lane.H2D, Lane.DISK_READ)] if life else []
    if life is None or not copies:
        return "for a copy the trace does not show"
    begun = min([*returns, copies[0].t])
    slow = max(copies, key=lambda span: span.d).lane
    backward = [event for event in evidence.events if _is_backward_layer(event)]
    opened = min((span.t for span in backward), default=stall.t)
    busy = union(
        (event.t, event.t + event.d) for event in evidence.events if isinstance(event, Span) and event.lane is slow
    )
    idle = length(subtraction([(opened, begun)], busy)) if begun > opened else 0
    if idle < episode.d:
        advice = "" if evidence.limits is not None else ": move fewer bytes"
        return f"because {_LANE_NAMES[slow]} was never idle long enough since backward began{advice}"
    why = "because nothing asked for it earlier" if begun >= stall.t else "because its prefetch began late"
    device = evidence.stats.peaks[0]
    if device.budget_nbytes is None:
        return why
    return f"{why}, with {format_bytes(max(device.budget_nbytes - device.used_nbytes, 0))} of the device budget free"


def _is_backward_layer(event: Event) -> bool:
    return isinstance(event, Span) and event.lane is Lane.COMPUTE and event.phase == "backward"


def _why_drain(evidence: Evidence) -> str:
    lane, forward = evidence.lane(Lane.D2H), evidence.stats.forward_ns
    why = "for its copy out to end"
    if not lane.bytes_per_s or not forward or not lane.nbytes:
        return why
    share = lane.bytes_per_s * forward / 1e9 / lane.nbytes
    if share >= 1:
        return f"{why}, though D2H could carry all of forward's bytes: they come in bursts"
    said = f"{why}: forward saves {format_bytes(lane.nbytes)} and D2H carries {rate(lane.bytes_per_s)}"
    return said if evidence.limits is not None else f"{said}; moving {percent(100 * share)} of that would hide"


def _why_host_full(evidence: Evidence) -> str:
    host = evidence.stats.peaks[1]
    budget = f" of {format_bytes(host.budget_nbytes)}" if host.budget_nbytes else ""
    return f"because the host arena{budget} is full until a write to disk ends; a larger one would remove it"


def _why_disk_queue(evidence: Evidence) -> str:
    lane = evidence.lane(Lane.DISK_WRITE)
    return f"because the disk is behind at {rate(lane.bytes_per_s)}; send fewer bytes to it or stripe over more disks"


_WHY: dict[StallCause, Callable[[Evidence], str]] = {
    StallCause.DRAIN: _why_drain,
    StallCause.HOST_FULL: _why_host_full,
    StallCause.DISK_QUEUE: _why_disk_queue,
}


def _collectives(evidence: Evidence) -> str | None:
    waited = evidence.stats.communication_ns
    if not evidence.notable(waited):
        return None
    share = percent(100 * waited / evidence.stats.duration_ns)
    return (
        f"Compute waits {duration(waited)} for collectives, {share} of the step, which no plan of activations changes."
    )


def _slow_link(evidence: Evidence) -> str | None:
    slow = [
        f"{_LANE_NAMES[lane.lane]} ran at {rate(lane.bytes_per_s)}, {percent(100 * lane.bytes_per_s / link)} of the "
        f"{rate(link)} {'that the machine has' if evidence.is_simulated else 'measured alone'}"
        for lane in evidence.stats.lanes
        if lane.bytes_per_s and (link := lane.link_bytes_per_s) and lane.bytes_per_s < SLOW_LINK * link
    ]
    return "; ".join(slow) + "." if slow else None


def _missed_prefetch(evidence: Evidence) -> str | None:
    prefetch = evidence.stats.prefetch
    if not prefetch.fetched:
        return None
    asked = prefetch.fetched + prefetch.prefetched
    return f"{prefetch.fetched:,} of {asked:,} reloads began only when backward asked for them."


def _budget(evidence: Evidence) -> str | None:
    texts = []
    for peak in evidence.stats.peaks:
        if not peak.budget_nbytes or not peak.used_nbytes:
            continue
        if peak.used_nbytes > peak.budget_nbytes:
            over = format_bytes(peak.used_nbytes - peak.budget_nbytes)
            texts.append(f"{peak.tier} is {over} over its budget of {format_bytes(peak.budget_nbytes)}")
        elif peak.used_nbytes > TIGHT * peak.budget_nbytes:
            share = percent(100 * peak.used_nbytes / peak.budget_nbytes)
            texts.append(f"{peak.tier} peaks at {share} of its budget of {format_bytes(peak.budget_nbytes)}")
    if not texts:
        return None
    sentence = "; ".join(texts) + "."
    return sentence[0].upper() + sentence[1:]


def _recompute(evidence: Evidence) -> str | None:
    """Said only where copying instead would be free: D2H and H2D mostly idle in their phase, and room for the bytes.

    Not of a planned step: the solver knew the links. On a full device a layer that is not recomputed may not fit while it
    is whole, wherever its bytes go afterwards.
    """
    stats = evidence.stats
    device, *others = stats.peaks
    lower = [peak for peak in others if peak.used_nbytes]
    if evidence.limits is not None or _is_tight(device) or (lower and all(map(_is_tight, lower))):
        return None
    out, back = evidence.lane(Lane.D2H).forward_busy_percent, evidence.lane(Lane.H2D).backward_busy_percent
    if not evidence.notable(stats.recompute_ns) or stats.stall_ns or not out or not back or max(out, back) > 80:
        return None
    return (
        f"Recompute takes {duration(stats.recompute_ns)} while D2H is idle {percent(100 - out)} of the forward and "
        f"H2D {percent(100 - back)} of the backward: a larger share could be moved instead."
    )


def _is_tight(peak: TierPeak) -> bool:
    return peak.budget_nbytes is not None and peak.used_nbytes > TIGHT * peak.budget_nbytes


def _plan(evidence: Evidence) -> str | None:
    texts = []
    for peak in evidence.stats.peaks:
        if not peak.predicted_nbytes:
            continue
        off = peak.saved_nbytes / peak.predicted_nbytes - 1
        if abs(off) > 1 - TIGHT:
            word = "above" if off > 0 else "below"
            texts.append(
                f"{peak.tier} peaks {percent(100 * abs(off))} {word} its {format_bytes(peak.predicted_nbytes)}"
            )
    return f"Against the plan, {', '.join(texts)}." if texts else None


def _uneven_ranks(evidence: Evidence) -> str | None:
    took = {
        rank.rank: step.duration_ns
        for rank in evidence.others
        for step in (*rank.steps, rank.total)
        if step.step == evidence.stats.step
    }
    if len(took) < 2:
        return None
    middle = sorted(took.values())[(len(took) - 1) // 2]
    slowest = max(took, key=lambda rank: took[rank])
    if took[slowest] < UNEVEN * middle:
        return None
    share = percent(100 * (took[slowest] / middle - 1))
    return f"Rank {slowest} is the slowest with {duration(took[slowest])}, {share} above the median rank."


def _health(evidence: Evidence) -> str | None:
    return " ".join(evidence.trace.remarks) or None


RULES: dict[str, Callable[[Evidence], str | None]] = {
    "step-time": _step_time,
    "outlier": _outlier,
    "declined": _declined,
    "copies-out": _copies_out,
    "copies-in": _copies_in,
    "worst-stall": _worst_stall,
    "missed-prefetch": _missed_prefetch,
    "slow-link": _slow_link,
    "budget": _budget,
    "recompute": _recompute,
    "collectives": _collectives,
    "plan-limits": _plan_limits,
    "plan": _plan,
    "uneven-ranks": _uneven_ranks,
    "health": _health,
}
"""Rules by name, in the order of the output."""
