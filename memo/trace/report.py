"""Report on a set of traces, computed once: lifetimes, figures and verdicts of every rank and step.

Terminal, page, picture and comparison all show a Report, so that they cannot disagree.
"""

from __future__ import annotations

import collections
import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

from memo.errors import UsageError
from memo.events import Event
from memo.trace.figures import RankStats, StepStats, to_json
from memo.trace.reader import Trace
from memo.trace.stats import rank_stats, representative_step
from memo.trace.tensor_lifetimes import TensorLifetime, lifetimes_of
from memo.trace.verdict import Evidence, Sentence, verdict

FORMAT = "memo-trace-stats"
VERSION = 1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankReport:
    """Trace, lifetimes, figures and verdicts of one rank."""

    trace: Trace
    lifetimes: Sequence[TensorLifetime]
    stats: RankStats
    verdicts: dict[int | None, tuple[Sentence, ...]]
    """Sentences by step; None is the whole trace."""

    def step(self, step: int | None) -> StepStats:
        """Returns the figures of one step, or of the whole trace for None.

        Raises:
            UsageError: the trace has no such step.
        """
        if step is None:
            return self.stats.total
        for one in self.stats.steps:
            if one.step == step:
                return one
        known = [one.step for one in self.stats.steps]
        has = f"steps {known[0]} to {known[-1]}" if known else "no steps"
        raise UsageError(f"rank {self.trace.rank} has no step {step}; it has {has}")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TraceReport:
    """Reports of all ranks, and the rank and step that represent the run."""

    ranks: Sequence[RankReport]
    rank: int
    step: int | None

    def of_rank(self, rank: int) -> RankReport:
        """Returns one rank's report.

        Raises:
            UsageError: no trace of that rank was given.
        """
        for one in self.ranks:
            if one.trace.rank == rank:
                return one
        raise UsageError(
            f"no trace of rank {rank} was given; there is {', '.join(str(r.trace.rank) for r in self.ranks)}"
        )

    def to_json(self) -> dict[str, Any]:
        """Converts the report to the format of `memo trace stats --json`."""
        return {
            "format": FORMAT,
            "version": VERSION,
            "rank": self.rank,
            "step": self.step,
            "ranks": [_rank_json(one) for one in self.ranks],
        }


def build_report(traces: Sequence[Trace], *, plain_s: float | None = None) -> TraceReport:
    """Builds the report of one run.

    The rank whose representative step took longest represents the run, since the others wait for it.

    Args:
        traces: of the ranks.
        plain_s: measured seconds of the same step without memo. None: of the trace's own steps that saved the same bytes and
            moved and recomputed none, if there are some.
    """
    lifetimes = [lifetimes_of(trace.events) for trace in traces]
    stats = [rank_stats(trace, lifetimes=own) for trace, own in zip(traces, lifetimes, strict=True)]
    chosen = max((representative_step(one) for one in stats), key=lambda step: (step.duration_ns, -step.rank))
    ranks = [
        RankReport(trace=trace, lifetimes=own, stats=one, verdicts=_verdicts(trace, own, one, stats, plain_s))
        for trace, own, one in zip(traces, lifetimes, stats, strict=True)
    ]
    return TraceReport(ranks=ranks, rank=chosen.rank, step=chosen.step)


def _verdicts(
    trace: Trace,
    lifetimes: Sequence[TensorLifetime],
    stats: RankStats,
    others: Sequence[RankStats],
    plain_s: float | None,
) -> dict[int | None, tuple[Sentence, ...]]:
    events: dict[int | None, list[Event]] = collections.defaultdict(list)
    for event in trace.events:
        events[event.step].append(event)
    by_step: dict[int | None, list[TensorLifetime]] = collections.defaultdict(list)
    for life in lifetimes:
        by_step[life.step].append(life)
    saved = {step: sum(life.nbytes for life in own) for step, own in by_step.items()}
    plain = [one for one in stats.steps[1:] if one.complete and _is_plain(one)]

    def plain_ns(one: StepStats) -> int | None:
        """Time of the same step without memo."""
        if plain_s is not None:
            return round(plain_s * 1e9)
        alike = [step.duration_ns for step in plain if saved.get(step.step) == saved.get(one.step)]
        return int(statistics.median(alike)) if alike and not _is_plain(one) else None

    events[None], by_step[None] = list(trace.events), list(lifetimes)
    return {
        one.step: verdict(
            Evidence(
                trace=trace,
                stats=one,
                events=events[one.step],
                lifetimes=by_step[one.step],
                others=others,
                plain_ns=plain_ns(one),
            )
        )
        for one in (*stats.steps, stats.total)
    }


def _is_plain(step: StepStats) -> bool:
    """Whether a step moved and recomputed nothing."""
    return not (step.recompute_ns or step.stall_ns or any(lane.copies for lane in step.lanes))


def _rank_json(one: RankReport) -> dict[str, Any]:
    trace = one.trace
    return {
        "rank": trace.rank,
        "world_size": trace.world_size,
        "path": trace.path,
        "events": len(trace.events),
        "dropped_events": trace.dropped,
        "remarks": list(trace.remarks),
        "total": _step_json(one, one.stats.total),
        "steps": [_step_json(one, step) for step in one.stats.steps],
    }


def _step_json(one: RankReport, step: StepStats) -> dict[str, Any]:
    figures: dict[str, Any] = to_json(step)
    return figures | {"verdict": [dataclasses.asdict(sentence) for sentence in one.verdicts[step.step]]}
