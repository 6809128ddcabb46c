"""Independent checker of activation plans: every rule of `memo.mip.activation.plan`.

Shares no code with the planner. It walks through one microbatch layer by layer with a clock and a balance of bytes, or
through a whole step turn by turn where a rank has several chunks, and compares what it finds with the budgets and with
the plan's own prediction. The first broken rule is returned, in the order of `Rule`; a plan is valid when there is
none.
"""

from __future__ import annotations

import dataclasses
import enum

from memo.errors import PlanInvalid
from memo.mip.activation.check_pipeline import own_layers, walk_turns
from memo.mip.activation.check_step import Walk, walk_microbatch
from memo.mip.activation.plan import ActivationPlan
from memo.mip.inputs.pipeline_schedules import PipelineSchedule
from memo.units import format_bytes

__all__ = ["Rule", "Violation", "check_plan", "require_valid"]

PREDICTION_TOLERANCE = 1e-3
"""Relative deviation of a plan's prediction from the checker's arithmetic that is accepted."""

LEAST_TOKENS = 16
"""Tokens of the smallest piece that a runtime recomputes at once."""

SECONDS_A_DAY = 24 * 60 * 60


class Rule(enum.StrEnum):
    """Rules of a valid plan."""

    POINT = "point"
    """Nothing is at a point that its layer cannot have, and a layer that cannot be divided is at one point."""
    PIECE = "piece"
    """A layer that cannot be divided is recomputed in one piece, and no piece is smaller than the runtime computes."""
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
    """Step time and peaks are as the plan predicts."""


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
    if pipeline.chunks > 1:
        walks = [walk_turns(plan, stage) for stage in range(pipeline.stages)]
    else:
        walks = [
            walk_microbatch(
                plan,
                *bounds,
                flight=_flight(plan, stage),
                rates=plan.problem.machine_of(stage).lanes,
                message_bytes=plan.problem.message_bytes(stage),
            )
            for stage, bounds in enumerate(_bounds(plan))
        ]
    return _device(plan, walks) or _shared(plan, walks) or _prediction(plan, walks)


def _bounds(plan: ActivationPlan) -> list[tuple[int, int]]:
    """First and last layer of each stage."""
    count, stages = len(plan.layers), plan.problem.pipeline.stages
    sizes = list(plan.problem.pipeline.layers)
    if not sizes:
        sizes = [count // stages + (1 if stage < count % stages else 0) for stage in range(stages)]
    return [(sum(sizes[:stage]), sum(sizes[: stage + 1]) - 1) for stage in range(stages)]


def _flight(plan: ActivationPlan, stage: int) -> int:
    """Microbatches that a stage of one chunk holds at once."""
    pipeline = plan.problem.pipeline
    if pipeline.schedule is PipelineSchedule.GPIPE:
        return pipeline.microbatches
    return pipeline.held or min(pipeline.microbatches, pipeline.stages - stage)


def _own(plan: ActivationPlan, stage: int) -> list[int]:
    """The layers of a stage."""
    if plan.problem.pipeline.chunks > 1:
        return own_layers(plan, stage)
    first, last = _bounds(plan)[stage]
    return list(range(first, last + 1))


def _layers(plan: ActivationPlan) -> Violation | None:
    problem = plan.problem
    stages = [_own(plan, stage) for stage in range(problem.pipeline.stages)]
    stage_of = {index: stage for stage, own in enumerate(stages) for index in own}
    machines = [problem.machine_of(stage) for stage in range(problem.pipeline.stages)]
    for index, (known, layer) in enumerate(zip(problem.profile.layer_profiles(), plan.layers, strict=True)):
        strange = set(layer.points) - {point.name for point in known.points}
        if strange:
            message = f"layer {index} is at point {min(strange)[:40]!r}, which its class {known.name!r} cannot have"
            return Violation(rule=Rule.POINT, message=message, layer=index)
        if not known.divisible and max(layer.points.values()) != 1:
            message = f"layer {index} is at {len(layer.points)} points, and its class {known.name!r} cannot be divided"
            return Violation(rule=Rule.POINT, message=message, layer=index)
        cut = layer.piece * problem.profile.signature.rank_tokens
        if layer.piece < 1 and not (known.divisible and cut > LEAST_TOKENS - 0.5):
            why = f"fewer than {LEAST_TOKENS}" if known.divisible else f"and its class {known.name!r} cannot be divided"
            message = f"layer {index} is recomputed in pieces of {cut:.0f} tokens, {why}"
            return Violation(rule=Rule.PIECE, message=message, layer=index)
        machine = machines[stage_of[index]]
        rates, budgets = machine.lanes, machine.budgets
        link = min(rates.d2h_bytes_per_s, rates.h2d_bytes_per_s) > 0
        drive = link and min(rates.disk_write_bytes_per_s, rates.disk_read_bytes_per_s) > 0
        if index == stages[stage_of[index]][-1] and layer.host + layer.disk > 0:
            return Violation(rule=Rule.LAST, message=f"layer {index} is a stage's last and moves", layer=index)
        for name, fraction, budget, way in (
            ("host", layer.host, budgets.host_bytes, link),
            ("disk", layer.disk, budgets.disk_bytes, drive),
        ):
            if fraction > 0 and not (budget and way):
                message = f"layer {index} moves to the {name}, which has {'no budget' if way else 'no bandwidth'}"
                return Violation(rule=Rule.TIER, message=message, layer=index)
    return None


def _device(plan: ActivationPlan, walks: list[Walk]) -> Violation | None:
    for stage, walk in enumerate(walks):
        budget = plan.problem.machine_of(stage).budgets.device_bytes
        if walk.peak > budget + 0.5:
            where = "an end of the model" if walk.peak_layer is None else f"layer {walk.peak_layer}"
            over = format_bytes(walk.peak - budget, up=True)
            message = f"{format_bytes(walk.peak)} at {where} are {over} above the budget of {format_bytes(budget)}"
            return Violation(rule=Rule.DEVICE, message=message, layer=walk.peak_layer)
    return None


def _shared(plan: ActivationPlan, walks: list[Walk]) -> Violation | None:
    """Checks host, disk and wear, which the ranks of each node share."""
    pipeline = plan.problem.pipeline
    step_s = pipeline.microbatches * max(walk.clock_s for walk in walks)  # no step is shorter
    for node in _nodes(plan):
        here = [(walks[stage], ranks) for stage, ranks in node.items()]
        budgets = plan.problem.machine_of(min(node)).budgets
        for rule, moved, budget in (
            (Rule.HOST, [walk.host for walk, _ in here], budgets.host_bytes),
            (Rule.DISK, [walk.disk for walk, _ in here], budgets.disk_bytes),
        ):
            used = sum(
                ranks * (nbytes + walk.rounding) for nbytes, (walk, ranks) in zip(moved, here, strict=True) if nbytes
            )
            if used > budget + 0.5:
                over = format_bytes(used - budget, up=True)
                message = f"{format_bytes(used)} on a node are {over} above its {rule} budget of {format_bytes(budget)}"
                rounded = ", rounded to whole storages and pages" if any(walk.rounding for walk, _ in here) else ""
                return Violation(rule=rule, message=f"{message}{rounded}")
        wear = budgets.disk_wear_bytes_per_day
        a_day = pipeline.microbatches * sum(ranks * walk.written for walk, ranks in here)
        a_day *= SECONDS_A_DAY / step_s if step_s else 0.0
        if wear is not None and a_day > wear * (1 + 1e-9) + 1:
            message = f"{a_day / 1e12:.4g} TB a day are written to a node's disks, above the {wear / 1e12:.4g} allowed"
            return Violation(rule=Rule.WEAR, message=message)
    return None


def _nodes(plan: ActivationPlan) -> list[dict[int, int]]:
    """Ranks of each stage on a node, once for all nodes that are alike."""
    problem, pipeline = plan.problem, plan.problem.pipeline
    nodes: list[dict[int, int]] = []
    filling: dict[int, int] = {}
    for stage in range(pipeline.stages):
        machine = problem.machine_of(stage)
        size = machine.budgets.ranks_per_node
        if machine.new_node:
            nodes.append(filling)
            filling = {}
        left = machine.node_ranks or pipeline.stage_ranks or size
        room = size - sum(filling.values())
        if 0 < room <= left:
            nodes.append(filling | {stage: room})
            full, left = divmod(left - room, size)
            nodes += [{stage: size}] * bool(full)
            filling = {}
        if left:
            filling[stage] = left
    return [node for node in [*nodes, filling] if node]


def _prediction(plan: ActivationPlan, walks: list[Walk]) -> Violation | None:
    microbatches = plan.problem.pipeline.microbatches
    for number, (walk, stage) in enumerate(zip(walks, plan.stages, strict=True)):
        for name, claimed, found in (
            ("microbatch_s", stage.microbatch_s, walk.clock_s),
            ("recompute_s", stage.recompute_s, walk.recompute_s),
            ("communication_s", stage.communication_s, walk.communication_s),
            ("sync_s", stage.sync_s, walk.sync_s),
            ("peak_device_bytes", stage.peak_device_bytes, walk.peak),
            ("peak_host_bytes", stage.peak_host_bytes, walk.host),
            ("peak_disk_bytes", stage.peak_disk_bytes, walk.disk),
            ("disk_written_bytes", stage.disk_written_bytes, walk.written * microbatches),
        ):
            slack = 1e-9 if name.endswith("_s") else len(plan.layers)
            if abs(claimed - found) > PREDICTION_TOLERANCE * abs(found) + slack:
                message = f"stage {number} claims {name} {claimed:.6g}, but the plan's rules give {found:.6g}"
                return Violation(rule=Rule.PREDICTION, message=message)
    return None
