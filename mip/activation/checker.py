"""Checker of activation plans: rules of their structure, and the bytes and seconds of a simulated step.

Owns what a plan may say: points and tiers that exist, figures that are those of its layers.
Bytes and seconds it does not count itself. The simulator, which shares with the planner only what a layer saves, holds and
moves, plays each stage by itself; no budget may be below what it finds, and no figure of the plan better. The first broken
rule is returned, in the order of `Rule`; a plan is valid when there is none.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Iterator, Sequence

from memo.errors import PlanInvalid
from memo.events import Lane, TierName
from memo.mip.activation.cost import predict_stages, rounding_bytes
from memo.mip.activation.plan import ActivationPlan, ChunkPrediction, StagePrediction
from memo.mip.activation.proof import shortened
from memo.mip.activation.simulator import simulate_stage
from memo.mip.simulate.result import StageSimulation
from memo.units import format_bytes

PREDICTION_TOLERANCE = 1e-3
"""Relative deviation of a plan's figures from its rules, and of these from a simulation, that is accepted."""

ROUNDS = 4
"""Microbatches for each stage that are played of schedules with several chunks, if those hold as much as all."""

SECONDS_A_DAY = 24 * 60 * 60


class Rule(enum.StrEnum):
    """Rules of a valid plan."""

    POINT = "point"
    """Each layer is at a point that its class has."""
    LAST = "last"
    """The last layer of a stage does not move."""
    TIER = "tier"
    """Nothing moves to a tier that has no budget or no bandwidth."""
    DEVICE = "device"
    """The device's budget is kept at every layer."""
    HOST = "host"
    DISK = "disk"
    WEAR = "wear"
    """Bytes written to a node's disks in a day stay within the budget."""
    PREDICTION = "prediction"
    """Times and peaks are as the plan predicts."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """A broken rule."""

    rule: Rule
    message: str
    layer: int | None = None


def require_valid(plan: ActivationPlan) -> None:
    """Checks a plan before it is used.

    Raises:
        PlanInvalid: the plan breaks a rule; the message is of the first one.
    """
    violation = check_plan(plan)
    if violation is not None:
        raise PlanInvalid(f"rule {violation.rule}: {violation.message}")


def check_plan(plan: ActivationPlan) -> Violation | None:
    """Returns the first violation in the order of `Rule`, or None for a valid plan."""
    violation = _layers(plan)
    if violation is not None:
        return violation
    pipeline = plan.problem.pipeline
    short = shortened(plan, ROUNDS * pipeline.stages * len(plan.layers)) if pipeline.chunks > 1 else plan
    try:
        played = [simulate_stage(short, stage) for stage in range(pipeline.stages)]
    except PlanInvalid as error:  # too long to be simulated
        return Violation(rule=Rule.PREDICTION, message=str(error))
    rules = predict_stages(plan.problem, plan.layers)
    own = rules if short is plan else predict_stages(short.problem, plan.layers)
    over = _device(plan, rules, played) or _shared(plan, rules, played)
    return over or _prediction(plan, rules) or _played(short, own, played)


def _layers(plan: ActivationPlan) -> Violation | None:
    problem = plan.problem
    stage_of = {index: stage for stage in problem.stages for index in stage.indices}
    for index, (known, layer) in enumerate(zip(problem.profile.layer_profiles(), plan.layers, strict=True)):
        if known.point(layer.point) is None:
            message = f"layer {index} is at point {layer.point[:40]!r}, which its class {known.name!r} cannot have"
            return Violation(rule=Rule.POINT, message=message, layer=index)
        machine = stage_of[index].machine
        rates, budgets = machine.lanes, machine.budgets
        link = min(rates.d2h_bytes_per_s, rates.h2d_bytes_per_s) > 0
        drive = link and min(rates.disk_write_bytes_per_s, rates.disk_read_bytes_per_s) > 0
        if index == stage_of[index].indices[-1] and layer.host + layer.disk > 0:
            return Violation(rule=Rule.LAST, message=f"layer {index} is a stage's last and moves", layer=index)
        for name, fraction, budget, way in (
            ("host", layer.host, budgets.host_bytes, link),
            ("disk", layer.disk, budgets.disk_bytes, drive),
        ):
            if fraction > 0 and not (budget and way):
                message = f"layer {index} moves to the {name}, which has {'no budget' if way else 'no bandwidth'}"
                return Violation(rule=Rule.TIER, message=message, layer=index)
    return None


def _most(plan: ActivationPlan, rules: StagePrediction, played: StageSimulation, tier: TierName) -> int:
    """Peak bytes of a tier by the plan's rules or the simulation, whichever has more."""
    return max(rules.peaks[tier], played.peak(tier).nbytes - _rounded_bytes(plan))


def _rounded_bytes(plan: ActivationPlan) -> int:
    """Bytes that the simulator, which rounds each part of each call to bytes, may have too many or too few."""
    return 4 * len(plan.layers) * plan.problem.pipeline.microbatches


def _device(
    plan: ActivationPlan, rules: Sequence[StagePrediction], played: Sequence[StageSimulation]
) -> Violation | None:
    for stage, predicted, simulated in zip(plan.problem.stages, rules, played, strict=True):
        held, budget = _most(plan, predicted, simulated, TierName.DEVICE), stage.machine.budgets.device_bytes
        if held > budget:
            where, over = simulated.peak(TierName.DEVICE).where, format_bytes(held - budget, up=True)
            message = f"{format_bytes(held)} in {where} are {over} above the budget of {format_bytes(budget)}"
            return Violation(rule=Rule.DEVICE, message=message)
    return None


def _shared(
    plan: ActivationPlan, rules: Sequence[StagePrediction], played: Sequence[StageSimulation]
) -> Violation | None:
    """Checks host, disk and wear, which the ranks of each node share."""
    problem = plan.problem
    rounding = [
        rounding_bytes(stage, divided=any(plan.layers[index].divided for index in stage.indices))
        for stage in problem.stages
    ]
    step_s = problem.pipeline.microbatches * max(stage.microbatch_s for stage in rules)  # no step is shorter
    for node in problem.nodes:
        budgets = problem.machine_of(min(node)).budgets
        for rule, tier, budget in (
            (Rule.HOST, TierName.HOST, budgets.host_bytes),
            (Rule.DISK, TierName.DISK, budgets.disk_bytes),
        ):
            held = {stage: _most(plan, rules[stage], played[stage], tier) for stage in node}
            used = sum(ranks * (held[stage] + rounding[stage]) for stage, ranks in node.items() if held[stage])
            if used > budget + 0.5 * sum(node.values()):  # peaks are rounded to bytes
                over = format_bytes(used - budget, up=True)
                message = f"{format_bytes(used)} on a node are {over} above its {rule} budget of {format_bytes(budget)}"
                rounded = ", rounded to whole storages and pages" if any(rounding[stage] for stage in node) else ""
                return Violation(rule=rule, message=f"{message}{rounded}")
        wear = budgets.disk_wear_bytes_per_day
        written = sum(ranks * rules[stage].disk_written_bytes for stage, ranks in node.items())
        a_day = written * SECONDS_A_DAY / step_s if step_s else 0.0
        if wear is not None and a_day > wear * (1 + 1e-9) + 1:
            message = f"{a_day / 1e12:.4g} TB a day are written to a node's disks, above the {wear / 1e12:.4g} allowed"
            return Violation(rule=Rule.WEAR, message=message)
    return None


def _prediction(plan: ActivationPlan, rules: Sequence[StagePrediction]) -> Violation | None:
    """Checks every figure of the plan against its own rules."""
    for number, (stage, own) in enumerate(zip(plan.stages, rules, strict=True)):
        for (name, claimed), (_, found) in zip(_figures(stage), _figures(own), strict=False):
            slack = 1e-9 if name.endswith("_s") else len(plan.layers)
            if abs(claimed - found) > PREDICTION_TOLERANCE * abs(found) + slack:
                message = f"stage {number} claims {name} {claimed:.6g}, but the plan's rules give {found:.6g}"
                return Violation(rule=Rule.PREDICTION, message=message)
    return None


def _figures(stage: StagePrediction) -> Iterator[tuple[str, float]]:
    """Names and values of a stage's figures, those of its chunks included."""
    yield "microbatch_s", stage.microbatch_s
    parts: tuple[StagePrediction | ChunkPrediction, ...] = (stage, *(stage.chunks or ()))
    for known in parts:
        for field in dataclasses.fields(known):
            if field.name != "chunks":
                yield field.name, getattr(known, field.name) or 0.0


def _played(
    plan: ActivationPlan, rules: Sequence[StagePrediction], played: Sequence[StageSimulation]
) -> Violation | None:
    """Checks that the simulated stages take no longer than by the rules, and hold and write as much."""
    pipeline = plan.problem.pipeline
    for number, (own, stage) in enumerate(zip(rules, played, strict=True)):
        microbatches = pipeline.microbatches if pipeline.chunks > 1 else pipeline.in_flight(number)
        written = own.disk_written_bytes * microbatches / pipeline.microbatches
        figures: list[tuple[str, float, float]] = [("written bytes", written, stage.moved_nbytes(Lane.DISK_WRITE))]
        figures += [(f"{tier} bytes", nbytes, stage.peak(tier).nbytes) for tier, nbytes in own.peaks.items()]
        wrong = [one for one in figures if abs(one[1] - one[2]) > PREDICTION_TOLERANCE * one[2] + _rounded_bytes(plan)]
        seconds = microbatches * own.microbatch_s + own.sync_s
        if stage.end_s > seconds * (1 + PREDICTION_TOLERANCE) + 1e-9:
            wrong.append(("seconds", seconds, stage.end_s))
        if wrong:
            name, said, found = wrong[0]
            message = f"stage {number} has {said:.6g} {name} by the plan's rules, and {found:.6g} played event by event"
            return Violation(rule=Rule.PREDICTION, message=message)
    return None
