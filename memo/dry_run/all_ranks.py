"""A dry run: one training step of every rank of a plan's layout in one process, without devices, bytes or other ranks.

Owns which ranks are run. Ranks of the same pipeline stage whose shards have equal shapes issue the same collectives over
their own groups, so one of them is run for all; the groups of every rank are torch's own, and are all looked at.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from memo.dry_run.agreement import (
    GROUPS,
    PEAK,
    STATES,
    against_plan,
    among_ranks,
    memberships,
    memory,
    moved_to,
)
from memo.dry_run.places import Place
from memo.dry_run.simulated_step import RankStep, groups_of_rank, step_of_rank
from memo.errors import UsageError
from memo.gpt.arithmetic import Collective, Ranks

if TYPE_CHECKING:
    from memo.dry_run.recorded_collectives import CollectiveCall
    from memo.gpt.arithmetic import PlannedRun
    from memo.mip.activation import ActivationPlan

MOST_RANKS = 4096


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankKind:
    """Ranks that do the same, one of which was run."""

    stage: int
    ranks: tuple[int, ...]
    step: RankStep
    """Step of the first of them."""
    planned: tuple[Collective, ...]
    """Its collectives by the plan's model."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DryRun:
    """Result of a dry run."""

    run: PlannedRun
    kinds: tuple[RankKind, ...]
    disagreements: tuple[str, ...]
    """Failures and differences from the plan; empty where all agrees."""
    duration_s: float


def dry_run(run: PlannedRun, *, progress: Callable[[str], None] = lambda _: None) -> DryRun:
    """Runs a step of each kind of rank, and compares.

    Args:
        run: the run, checked. The process must have no process group.
        progress: called with what is done next.

    Raises:
        UsageError: there are too many ranks, or one.
        RecordError: the step issues a collective that memo's training does not have.
    """
    if run.layout.ranks == 1:
        raise UsageError("the plan is for one rank, which talks to no other; memo simulate plays its step")
    if run.layout.ranks > MOST_RANKS:
        raise UsageError(f"the plan is for {run.layout.ranks:,} ranks; a dry run is of at most {MOST_RANKS:,}")
    begin = time.perf_counter()
    places = [Place.of(run.layout, rank) for rank in range(run.layout.ranks)]
    wrong: list[str] = []
    for place in places:
        if place.rank % 64 == 0:
            progress(f"groups of rank {place.rank} of {len(places)}")
        wrong += memberships(place, groups_of_rank(run.layout, place.rank))
    kinds = []
    alike = _kinds(run, places)
    for number, ranks in enumerate(alike, 1):
        progress(f"step of rank {ranks[0]}, kind {number} of {len(alike)}")
        kinds.append(_kind(run, ranks))
        place, step = places[ranks[0]], kinds[-1].step
        wrong += against_plan(place, step.calls, kinds[-1].planned, recomputed(run, place.pp))
    if run.plan is not None:
        wrong += _memory(run.plan, kinds)
    progress("comparing the ranks")
    wrong += _among_kinds(places, kinds)
    return DryRun(
        run=run,
        kinds=tuple(kinds),
        disagreements=tuple(dict.fromkeys(wrong)),
        duration_s=time.perf_counter() - begin,
    )


def _kinds(run: PlannedRun, places: Sequence[Place]) -> list[tuple[int, ...]]:
    """Ranks of the same stage with parts of equal shapes, and in a ring at the same place of it."""
    model = run.collectives
    found: dict[object, list[int]] = {}
    for place in places:
        shapes = model.shard_rows(run.chunks_of(place.pp), tp_rank=place.tp, replica=place.replica)
        key = place.pp, shapes, place.cp if model.rings else 0
        found.setdefault(key, []).append(place.rank)
    return [tuple(ranks) for ranks in found.values()]


def _memory(plan: ActivationPlan, kinds: Sequence[RankKind]) -> Iterator[str]:
    """Compares what the ranks of each stage hold with the plan."""
    for stage, planned in enumerate(plan.stages):
        own = [kind for kind in kinds if kind.stage == stage]
        static = plan.problem.stages[stage].static
        states = {kind.ranks[0]: kind.step.states_bytes for kind in own}
        of_states = static.weights + static.optimizer
        yield from memory(states, of_states, STATES, stage=stage, what="its weights and optimizer state are")
        peaks = {kind.ranks[0]: kind.step.peak_bytes for kind in own}
        yield from memory(peaks, planned.peak_device_bytes, PEAK, stage=stage)


def recomputed(run: PlannedRun, stage: int) -> list[Collective]:
    """At most what the plan's recompute repeats on a rank of a stage."""
    if run.plan is None:
        return []
    plans = [run.plan.layers[index] for index in run.plan.problem.stages[stage].indices]
    layers = sum(plan.recomputes for plan in plans)
    return [
        dataclasses.replace(each, nbytes=each.nbytes * layers).times(run.microbatches)
        for each in run.collectives.layer_again()
    ]


def _kind(run: PlannedRun, ranks: tuple[int, ...]) -> RankKind:
    place = Place.of(run.layout, ranks[0])
    step = step_of_rank(run, ranks[0])
    planned = run.collectives_of(stage=place.pp, tp_rank=place.tp, replica=place.replica)
    return RankKind(stage=place.pp, ranks=ranks, step=step, planned=tuple(planned))


def _among_kinds(places: Sequence[Place], kinds: Sequence[RankKind]) -> Iterator[str]:
    """Compares the members of each group, once for all groups whose members are of the same kinds."""
    kind_of = {rank: number for number, kind in enumerate(kinds) for rank in kind.ranks}
    for group in GROUPS:
        looked_at: set[int] = set()
        seen: set[tuple[int, ...]] = set()
        for place in places:
            if place.rank in looked_at:
                continue
            ranks = place.group(group)
            looked_at.update(ranks, [place.rank])
            members = tuple(kind_of[rank] for rank in ranks)
            if members not in seen:
                seen.add(members)
                yield from among_ranks(_calls_within(ranks, places, kinds, kind_of, group))


def _calls_within(
    ranks: Sequence[int],
    places: Sequence[Place],
    kinds: Sequence[RankKind],
    kind_of: Mapping[int, int],
    group: Ranks,
) -> dict[int, list[CollectiveCall]]:
    """Calls over one group, of its members; where it has no order of stages, of one member of each kind."""
    found: dict[int, list[CollectiveCall]] = {}
    taken: set[int] = set()
    for rank in ranks:
        kind = kinds[kind_of[rank]]
        if kind_of[rank] in taken and group not in (Ranks.STAGES, Ranks.ENDS):
            continue
        taken.add(kind_of[rank])
        moved = moved_to(kind.step.calls, places[kind.ranks[0]], places[rank])
        found[rank] = [call for call in moved if call.ranks == tuple(ranks)]
    return found
