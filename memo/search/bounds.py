"""Lower bounds on a candidate's step, each a part of what its plan is predicted to take, from the cheapest to the tightest.

Every bound is about the cost model of `memo.mip.activation`: no plan of the candidate has a shorter predicted step.

    compute        the step's FLOPs on all GPUs at the highest rate; then the slowest stage's work of all microbatches,
                   and the optimizer
    communication  with the collectives that nothing hides, gathers and reductions of weights included
    bubble         with the waits of the pipeline's stages: the step if everything were kept
    memory         no plan fits: what a rank holds in any case, or what it cannot move or recompute
    link           with what the budgets cannot hold moved over the links or recomputed, whichever costs less

The last one relaxes the planner's linear program. A stage's layers are added up by how often a moment holds them; only the
fullest moments count; a layer's copies may use the windows of the whole pass; what a recompute holds is left out. So each
plan that keeps the budgets is a solution of it. With T_s = F_s + B_s of a stage s, M microbatches and a_s of them ahead
before the first backward, a step takes at least, in a pipeline whose ranks have one chunk each,

    sum_{i<s} T_i + M T_s                                                     all of a stage, between fill and drain
    sum_{i<s} T_i + (M - a_s + 1) T_s + 2 sum_{i>s} T_i       if M > a_s      there and back, twice
    sum_{i<s} T_i + F_s + sum_{i>s} T_i + M B_s + (M - a_s) F_s               all that follows the first backward
    sum_{i<s} T_i + B_s + sum_{i>s} T_i + M F_s + (M - a_s) B_s               all that comes before the last forward

and the messages on these ways. With several chunks the first row, and the fill alone, stand for them.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from memo.mip import RowProgram
from memo.mip.activation import (
    ActivationPlan,
    LayerPlan,
    device_peak_candidates,
    predict_kept_times,
    predict_stages,
)
from memo.mip.inputs import Pass

if TYPE_CHECKING:
    from memo.mip.activation import ActivationProblem, PeakCandidate, StageMachine, StagePrediction, StageView
    from memo.mip.inputs import EmbeddingOrHeadProfile, LayerProfile

MOMENTS = 2
"""Fullest moments of a stage that count, by each of two orders."""
STAGES = 6
"""Stages of a pipeline whose memory counts."""
SAFETY = 1e-6
"""Fraction that is taken off a solver's answer, and added to its budgets, for its tolerances."""


class Bound(enum.StrEnum):
    """Kind of a bound: what makes a candidate take so long."""

    COMPUTE = "compute"
    COMMUNICATION = "communication"
    BUBBLE = "bubble"
    LINK = "link"
    MEMORY = "memory"


@dataclasses.dataclass(frozen=True, slots=True)
class BoundSequence:
    """Bounds of a candidate, or of several at once, in ascending order."""

    steps: tuple[tuple[Bound, float], ...] = ()

    @property
    def seconds(self) -> float:
        """The highest bound."""
        return self.steps[-1][1] if self.steps else 0.0

    def raised(self, *more: tuple[Bound, float]) -> BoundSequence:
        """With further bounds, of which those that are not higher are left out."""
        steps = list(self.steps)
        for kind, seconds in more:
            if not steps or seconds > steps[-1][1]:
                steps.append((kind, seconds))
        return BoundSequence(tuple(steps))

    def kind(self, beyond_s: float) -> Bound:
        """The kind of the first bound above `beyond_s`, or of the highest."""
        return next((kind for kind, seconds in self.steps if seconds > beyond_s), self.steps[-1][0])


def work_bounds(problem: ActivationProblem) -> BoundSequence:
    """Bounds by the slowest stage's work, under any schedule, division of the layers and sharding.

    Of a problem in which nothing is sharded: the optimizer's step depends on the sharding and is left out. A stage has a
    part of all work at least, and some stage as many layers as an equal division gives one at most. Where stages have
    machines of their own, of this division of the layers alone.
    """
    profile, pipeline = problem.profile, problem.pipeline
    known, times = profile.layer_profiles(), pipeline.microbatches
    most = -(-len(known) // pipeline.stages)
    parts: list[LayerProfile | EmbeddingOrHeadProfile] = [*known, profile.embedding, profile.head]
    work, exchanged = zip(*map(_work_s, parts), strict=True)
    layers_s = [work_s - exchanged_s for work_s, exchanged_s in zip(work, exchanged, strict=True)][: len(known)]
    alone = max((math.fsum(work) - math.fsum(exchanged)) / pipeline.stages, most * min(layers_s))
    waiting = max(math.fsum(work) / pipeline.stages, most * min(work[: len(known)]))
    return BoundSequence().raised((Bound.COMPUTE, times * alone), (Bound.COMMUNICATION, times * waiting))


def _work_s(part: LayerProfile | EmbeddingOrHeadProfile) -> tuple[float, float]:
    """Seconds of a microbatch's two passes, and those of them in which it waits for collectives."""
    return part.forward_s + part.backward_s, part.forward_exchange_s + part.backward_exchange_s


def kept_bounds(problem: ActivationProblem) -> tuple[BoundSequence, ActivationPlan]:
    """Bounds by the step that keeps everything, and that plan, whether or not it fits, without its peaks."""
    layers = (LayerPlan(),) * len(problem.profile.layers)
    plan = ActivationPlan(problem=problem, layers=layers, stages=predict_kept_times(problem))
    last, times = problem.update, problem.pipeline.microbatches
    alone = times * max(stage.compute_s for stage in plan.stages) + last.optimizer_s
    waiting = max(times * stage.microbatch_s + stage.sync_s for stage in plan.stages)
    waiting += last.optimizer_s + last.optimizer_exchange_s
    found = BoundSequence().raised((Bound.COMPUTE, alone), (Bound.COMMUNICATION, waiting), (Bound.BUBBLE, plan.step_s))
    return found, plan


def schedule_bounds(problem: ActivationProblem) -> BoundSequence:
    """Bounds by a schedule, under any sharding: of a problem in which nothing is sharded.

    Reductions of gradients and the optimizer's step depend on the sharding and are left out.
    """
    stages = [dataclasses.replace(stage, sync_s=0.0) for stage in predict_kept_times(problem)]
    bare = dataclasses.replace(problem.profile, optimizer_s=0.0, optimizer_exchange_s=0.0)
    machines = tuple(
        dataclasses.replace(machine, optimizer_s=0.0, optimizer_exchange_s=0.0) for machine in problem.machines
    )
    plan = ActivationPlan(
        problem=dataclasses.replace(problem, profile=bare, machines=machines),
        layers=(LayerPlan(),) * len(problem.profile.layers),
        stages=tuple(stages),
    )
    return work_bounds(problem).raised((Bound.BUBBLE, plan.step_s))


def has_room(problem: ActivationProblem) -> bool:
    """Whether the device may hold what every plan holds in any case; if not, no plan fits.

    The cheapest bound by memory: static bytes first, then the likely peaks of the stages whose memory counts.
    """
    counted = [problem.stages[number] for number in _counted_stages(problem.pipeline.stages)]
    if any(stage.static.nbytes > stage.machine.budgets.device_bytes for stage in counted):
        return False
    return all(
        place.resident_bytes <= stage.machine.budgets.device_bytes
        for stage in counted
        for place in device_peak_candidates(stage, likely_only=True)
    )


def keeps_all(kept: ActivationPlan) -> bool:
    """Whether the plan that keeps everything fits the device."""
    problem = kept.problem
    budgets = [stage.machine.budgets.device_bytes for stage in problem.stages]
    if any(_kept_bytes(stage) > budget for stage, budget in zip(problem.stages, budgets, strict=True)):
        return False
    predictions = predict_stages(problem, kept.layers)
    return all(stage.peak_device_bytes <= budget for stage, budget in zip(predictions, budgets, strict=True))


def link_bound(kept: ActivationPlan) -> float:
    """Bound by the budgets: the least step in which what they cannot hold is moved or recomputed; infinite where none is.

    Args:
        kept: the plan that keeps everything.
    """
    program = _Program(kept)
    least = program.solve()
    if least is None:
        return math.inf
    last = kept.problem.update
    return max(least * (1 - SAFETY), 0.0) + last.optimizer_s + last.optimizer_exchange_s


@dataclasses.dataclass(slots=True, kw_only=True)
class _Group:
    """Layers of a stage that are of one class, and that each moment which counts holds equally often."""

    layer: LayerProfile
    count: int
    weights: tuple[tuple[int, int], ...]
    """For each moment numbers of microbatches whose kept bytes are held, and of those that hold all but what has moved."""
    copied: bool
    """Whether what moves is copied in every microbatch; not so between two passes."""
    points: dict[str, int] = dataclasses.field(default_factory=dict)
    """For each point but `all` the variable of the number of layers at it."""
    host: int | None = None
    disk: int | None = None


class _Program:
    """The relaxed linear program of one problem, in units of the largest layer's bytes and of the mean layer's time."""

    def __init__(self, kept: ActivationPlan) -> None:
        self._kept, self._problem = kept, kept.problem
        layers = self._problem.profile.layer_profiles()
        self._byte = float(max(max(layer.full_bytes for layer in layers), 1))
        self._second = max(sum(stage.compute_s for stage in kept.stages) / len(layers), 1e-12)
        self._program = RowProgram()
        self._fits = True
        self._forward: list[int] = []
        self._backward: list[int] = []
        self._stages = [self._stage(*pair) for pair in zip(self._problem.stages, kept.stages, strict=True)]
        self._node_rows()
        self._step = self._program.variable()
        self._step_rows()

    def solve(self) -> float | None:
        """Seconds of the least step, without the optimizer; None where the budgets cannot be kept."""
        least = self._program.minimum(self._step) if self._fits else None
        return None if least is None else least * self._second

    def _stage(self, stage: StageView, prediction: StagePrediction) -> list[_Group]:
        """Variables and rows of one stage; of a long pipeline only some of the stages have rows of memory."""
        program = self._program
        moments = _fullest(stage) if stage.number in _counted_stages(stage.pipeline.stages) else []
        groups = self._groups(stage, moments)
        for group in groups:
            self._variables(group, stage.machine)
        budget = stage.machine.budgets.device_bytes * (1 + SAFETY)
        for number, (resident, *_) in enumerate(moments):
            terms: collections.defaultdict[int, float] = collections.defaultdict(float)
            held = 0.0
            for group in groups:
                kept, unmoved = group.weights[number]
                held += self._add_kept(terms, group, kept) + self._add_unmoved(terms, group, unmoved)
            room = (budget - resident) / self._byte - held
            if terms:
                program.row(terms, upper=room)
            elif room < 0:
                self._fits = False
        self._time_rows(stage, prediction, groups)
        return groups

    def _groups(self, stage: StageView, moments: Sequence[_Moment]) -> list[_Group]:
        found: dict[tuple[object, ...], _Group] = {}
        lasts = {own[-1] for own in stage.numbers if len(stage.numbers) > 1}
        for number, layer in enumerate(stage.layers):
            weights = tuple((kept[number], unmoved[number]) for _, kept, unmoved in moments)
            last = number in lasts
            key = (layer.name, weights, last)
            group = found.setdefault(key, _Group(layer=layer, count=0, weights=weights, copied=not last))
            group.count += 1
        return list(found.values())

    def _variables(self, group: _Group, machine: StageMachine) -> None:
        program, layer, rates, budgets = self._program, group.layer, machine.lanes, machine.budgets
        link = rates.d2h_bytes_per_s > 0 and rates.h2d_bytes_per_s > 0
        drive = link and rates.disk_write_bytes_per_s > 0 and rates.disk_read_bytes_per_s > 0
        for point in layer.points[1:]:
            group.points[point.name] = program.variable(0.0, group.count)
        if len(group.points) > 1:
            program.row(dict.fromkeys(group.points.values(), 1.0), upper=group.count)
        if link and budgets.host_bytes > 0:
            group.host = program.variable()
        if drive and budgets.disk_bytes > 0:
            group.disk = program.variable()
        if group.host is not None or group.disk is not None:
            terms: collections.defaultdict[int, float] = collections.defaultdict(float)
            fixed = self._add_kept(terms, group, 1)
            program.row(terms, lower=-fixed)

    def _add_kept(self, terms: collections.defaultdict[int, float], group: _Group, weight: int) -> float:
        """Adds a group's kept bytes to a row, and returns its constant."""
        if not weight:
            return 0.0
        layer = group.layer
        whole = layer.points[0].saved_bytes
        for point in layer.points[1:]:
            terms[group.points[point.name]] += weight * (point.saved_bytes - whole) / self._byte
        for moved in (group.host, group.disk):
            if moved is not None:
                terms[moved] -= weight
        return weight * group.count * layer.full_bytes / self._byte

    def _add_unmoved(self, terms: collections.defaultdict[int, float], group: _Group, weight: int) -> float:
        """Adds all bytes of a group but the moved ones to a row, and returns its constant."""
        for moved in (group.host, group.disk):
            if moved is not None and weight:
                terms[moved] -= weight
        return weight * group.count * group.layer.full_bytes / self._byte

    def _time_rows(self, stage: StageView, prediction: StagePrediction, groups: Sequence[_Group]) -> None:
        """F and B of a stage: at least as long as if all were kept, as the copies take, and as the work takes."""
        program, rates = self._program, stage.machine.lanes
        ends_s = [sum(end.forward_s for end in stage.ends), sum(end.backward_s for end in stage.ends)]
        backward_s = prediction.microbatch_s - prediction.forward_s
        forward = program.variable(prediction.forward_s / self._second)
        backward = program.variable(max(backward_s, 0.0) / self._second)
        self._forward.append(forward)
        self._backward.append(backward)
        worked_s = sum(layer.backward_s for layer in stage.layers) + ends_s[1]
        again = {
            group.points[point.name]: -point.recompute_s / self._second
            for group in groups
            for point in group.layer.points[1:]
            if point.recompute_s
        }
        if again:
            program.row({backward: 1.0, **again}, lower=worked_s / self._second)
        for time, link, disk, end_s in (
            (forward, rates.d2h_bytes_per_s, rates.disk_write_bytes_per_s, ends_s[0]),
            (backward, rates.h2d_bytes_per_s, rates.disk_read_bytes_per_s, ends_s[1]),
        ):
            self._copy_rows(time, groups, link, disk, end_s)

    def _copy_rows(self, time: int, groups: Sequence[_Group], link: float, disk: float, end_s: float) -> None:
        hosts = [group.host for group in groups if group.copied and group.host is not None]
        disks = [group.disk for group in groups if group.copied and group.disk is not None]
        if not (hosts or disks):
            return
        per_byte = self._byte / self._second
        self._program.row({time: 1.0, **dict.fromkeys((*hosts, *disks), -per_byte / link)}, lower=end_s / self._second)
        if disks:
            lane = min(link, disk)
            delay = max(2 / link - 1 / lane, 0.0)
            terms = {time: 1.0, **dict.fromkeys(disks, -per_byte / lane), **dict.fromkeys(hosts, -per_byte * delay)}
            self._program.row(terms, lower=end_s / self._second)

    def _node_rows(self) -> None:
        """What a node's ranks move together."""
        problem = self._problem
        for node in problem.nodes:
            budgets = problem.stages[min(node)].machine.budgets
            for budget, tier in ((budgets.host_bytes, "host"), (budgets.disk_bytes, "disk")):
                terms: dict[int, float] = {}
                for stage, ranks in node.items():
                    held = _least_held(problem.pipeline.peak_in_flight(stage))
                    for group in self._stages[stage]:
                        moved = getattr(group, tier)
                        if moved is not None:
                            terms[moved] = ranks * held
                if terms:
                    self._program.row(terms, upper=budget * (1 + SAFETY) / self._byte)

    def _step_rows(self) -> None:
        """The step, from below."""
        problem, count = self._problem, len(self._stages)
        pipeline, times = problem.pipeline, problem.pipeline.microbatches
        sends = [problem.send_s(stage, stage + 1) / self._second for stage in range(count - 1)]
        if pipeline.chunks > 1:
            for stage in range(count):
                fill = self._chunked_fill(stage)
                self._path({stage: (times, times)}, fill / self._second)
            return
        for stage in range(count):
            before = dict.fromkeys(range(stage), (1, 1))
            after = dict.fromkeys(range(stage + 1, count), (1, 1))
            ahead = min(pipeline.in_flight(stage), times)
            there, back = 2 * sum(sends[:stage]), 2 * sum(sends[stage:])
            self._path({**before, stage: (times, times)}, there)
            if after:
                self._path({**before, stage: (1 + times - ahead, times), **after}, there + back)
                self._path({**before, stage: (times, 1 + times - ahead), **after}, there + back)
            if after and times > ahead:
                twice = dict.fromkeys(after, (2, 2))
                turns = times - ahead + 1
                self._path({**before, stage: (turns, turns), **twice}, there + 2 * back)

    def _path(self, turns: dict[int, tuple[int, int]], constant: float) -> None:
        """The step takes at least as long as so many forwards and backwards of these stages.

        Reductions of gradients that end behind the first stage's last backward take as long as without any recompute.
        """
        terms = {self._step: 1.0}
        for stage, (forwards, backwards) in turns.items():
            terms[self._forward[stage]] = -float(forwards)
            terms[self._backward[stage]] = -float(backwards)
        self._program.row(terms, lower=constant)
        first = self._kept.stages[0]
        if first.sync_s and 0 in turns:
            forwards, backwards = turns[0]
            terms[self._forward[0]], terms[self._backward[0]] = 1.0 - forwards, 1.0 - backwards
            self._program.row(terms, lower=constant + (first.microbatch_s + first.sync_s) / self._second)

    def _chunked_fill(self, stage: int) -> float:
        """Seconds before the first turn of a rank with several chunks: the first chunks of the ranks before it."""
        fill = 0.0
        for number, other in enumerate(self._kept.stages[:stage]):
            fill += other.turn_s(0, Pass.FORWARD) + self._problem.send_s(number, number + 1)
        return fill


def _counted_stages(count: int) -> list[int]:
    """Stages of a pipeline of `count` whose memory counts."""
    if count <= STAGES:
        return list(range(count))
    return sorted({place * (count - 1) // (STAGES - 1) for place in range(STAGES)})


_Moment = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Resident bytes, and by layer the microbatches whose kept bytes are held, and those that hold all but what has moved."""


def _fullest(stage: StageView) -> list[_Moment]:
    """The likely moments of a stage that hold most: if everything is kept, and if nothing is."""
    places = device_peak_candidates(stage, likely_only=True)
    by_kept = sorted(places, key=lambda place: -_whole_bytes(place, stage))[:MOMENTS]
    by_resident = sorted(places, key=lambda place: -place.resident_bytes)[:MOMENTS]
    return list(dict.fromkeys((place.resident_bytes, place.kept, place.unmoved) for place in (*by_kept, *by_resident)))


def _whole_bytes(place: PeakCandidate, stage: StageView) -> int:
    """Bytes on the device at a place if everything is kept."""
    held = zip(place.kept, place.unmoved, stage.layers, strict=True)
    return place.resident_bytes + sum((kept + unmoved) * layer.full_bytes for kept, unmoved, layer in held)


def _kept_bytes(stage: StageView) -> int:
    """Bytes on the device at the fullest of the moments that count, if everything is kept."""
    return max(_whole_bytes(place, stage) for place in device_peak_candidates(stage, likely_only=True))


def _least_held(peaks: Sequence[Sequence[int]]) -> int:
    """Microbatches in flight of every chunk at one time, at least."""
    return max(min(held) for held in peaks)
