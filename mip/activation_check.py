"""Checks an activation plan against every rule of `memo.mip.activation`, independently of how it was made.

Shares no code with the planner: it walks through one microbatch layer by layer, with a clock and a balance of bytes, and
compares what it finds with the budgets and with what the plan itself predicts. The first rule broken is returned, in the
order of `Rule`; a plan is valid when none is.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence

from memo.errors import PlanInvalid
from memo.mip.activation import ActivationPlan, LayerPlan
from memo.mip.profile import LayerProfile
from memo.units import format_bytes

__all__ = ["Rule", "Violation", "check_plan", "require_valid"]

PREDICTION_TOLERANCE = 1e-3
"""How far a plan's own prediction may be from what its rules give, as a share."""

SECONDS_A_DAY = 24 * 60 * 60


class Rule(enum.StrEnum):
    """What a valid plan keeps."""

    LEVEL = "level"
    """No token is at a level that its layer cannot have."""
    LAST = "last"
    """The last layer of a stage does not move."""
    TIER = "tier"
    """Nothing moves to a tier that is turned off or has no way there and back."""
    DEVICE = "device"
    """The device's budget is kept while every layer runs."""
    HOST = "host"
    DISK = "disk"
    WEAR = "wear"
    """What a day writes to the disks of a node stays within the budget."""
    PREDICTION = "prediction"
    """Step time and peaks are those that the plan claims."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """The first rule a plan breaks, in words and by name."""

    rule: Rule
    message: str
    layer: int | None = None


@dataclasses.dataclass(slots=True, kw_only=True)
class _Walk:
    """One stage's microbatch, walked through."""

    flight: int
    """Microbatches that are held at once."""
    clock_s: float = 0.0
    recompute_s: float = 0.0
    peak: float = 0.0
    peak_layer: int | None = None
    """None: an end of the model rather than a layer."""
    host: float = 0.0
    disk: float = 0.0
    rounding: float = 0.0
    """What whole storages and whole pages may take of a tier beyond those, in one microbatch."""


def require_valid(plan: ActivationPlan) -> None:
    """Raises PlanInvalid with the first violation, if there is one."""
    violation = check_plan(plan)
    if violation is not None:
        raise PlanInvalid(f"rule {violation.rule}: {violation.message}")


def check_plan(plan: ActivationPlan) -> Violation | None:
    """The first rule that the plan breaks, or None."""
    violation = _layers(plan)
    if violation is not None:
        return violation
    walks = [_walk(plan, *bounds) for bounds in _bounds(plan)]
    return _device(plan, walks) or _shared(plan, walks) or _prediction(plan, walks)


def _bounds(plan: ActivationPlan) -> list[tuple[int, int]]:
    """First and last layer of each stage."""
    count, stages = len(plan.layers), plan.problem.pipeline.stages
    sizes = [count // stages + (1 if stage < count % stages else 0) for stage in range(stages)]
    return [(sum(sizes[:stage]), sum(sizes[: stage + 1]) - 1) for stage in range(stages)]


def _layers(plan: ActivationPlan) -> Violation | None:
    problem, lasts = plan.problem, {last for _, last in _bounds(plan)}
    rates = problem.hardware.lanes(problem.budgets.ranks_per_node)
    link = min(rates.d2h_bytes_per_s, rates.h2d_bytes_per_s) > 0
    drive = link and min(rates.disk_write_bytes_per_s, rates.disk_read_bytes_per_s) > 0
    for index, (known, layer) in enumerate(zip(problem.profile.layer_profiles(), plan.layers, strict=True)):
        possible = {level.level.value for level in known.levels}
        for name, fraction in zip(("all", "matmuls", "attention"), layer.token_fractions, strict=True):
            if fraction > 0 and name not in possible:
                message = f"layer {index} has tokens at level {name!r}, which its class {known.name!r} cannot have"
                return Violation(rule=Rule.LEVEL, message=message, layer=index)
        if index in lasts and layer.host + layer.disk > 0:
            return Violation(rule=Rule.LAST, message=f"layer {index} is a stage's last and moves", layer=index)
        for name, fraction, budget, way in (
            ("host", layer.host, problem.budgets.host_bytes, link),
            ("disk", layer.disk, problem.budgets.disk_bytes, drive),
        ):
            if fraction > 0 and not (budget and way):
                message = f"layer {index} moves to the {name}, which has {'no budget' if way else 'no bandwidth'}"
                return Violation(rule=Rule.TIER, message=message, layer=index)
    return None


def _walk(plan: ActivationPlan, first: int, last: int) -> _Walk:
    """Forward and backward through layers first to last: the clock runs, bytes come and go."""
    problem = plan.problem
    profile, rates = problem.profile, problem.hardware.lanes(problem.budgets.ranks_per_node)
    known, starts, ends = profile.layer_profiles(), first == 0, last == len(plan.layers) - 1
    behind = problem.pipeline.stages - [bound for bound, _ in _bounds(plan)].index(first)
    flight = problem.pipeline.held or min(problem.pipeline.microbatches, behind)
    walk = _Walk(flight=flight)
    others = (flight - 1) * sum(_saved(known[i], plan.layers[i]) * plan.layers[i].kept for i in range(first, last + 1))
    if flight > 1:  # of the microbatch whose forward ran last, the last layer still stands whole
        others += (
            _whole(known[last], plan.layers[last]) - _saved(known[last], plan.layers[last]) * plan.layers[last].kept
        )
    held = others + sum(known[index].static_bytes for index in range(first, last + 1))
    if starts:
        held += profile.embedding.static_bytes + flight * profile.embedding.saved_bytes
    if ends:
        held += profile.head.static_bytes
    if starts:
        _stands(walk, held + profile.embedding.transient_bytes, None)
        walk.clock_s += profile.embedding.forward_s + profile.embedding.backward_s
    out_s = 0.0
    for index in range(first, last + 1):
        layer = known[index]
        before = _whole(known[index - 1], plan.layers[index - 1]) if index > first else 0
        moving = max(layer.forward_transient_bytes, layer.backward_transient_bytes)
        _stands(walk, held + before + _whole(layer, plan.layers[index]) + moving, index)
        if index > first:  # the layer before keeps only what the plan keeps of it from the next one on
            held += _saved(known[index - 1], plan.layers[index - 1]) * plan.layers[index - 1].kept
        walk.clock_s += max(layer.forward_s, out_s)
        host, disk = _moved(layer, plan.layers[index])
        out_s = _copy_s(host, disk, rates.d2h_bytes_per_s, rates.disk_write_bytes_per_s)
        walk.host += host
        walk.disk += disk
    if ends:
        stands = _whole(known[last], plan.layers[last]) + profile.head.saved_bytes + profile.head.transient_bytes
        _stands(walk, held + stands, None)
        walk.clock_s += profile.head.forward_s + profile.head.backward_s
    for index in range(last, first - 1, -1):
        recompute_s = plan.layers[index].recompute_s(known[index])
        in_s = 0.0
        if index > first:
            host, disk = _moved(known[index - 1], plan.layers[index - 1])
            in_s = _copy_s(host, disk, rates.h2d_bytes_per_s, rates.disk_read_bytes_per_s)
        walk.clock_s += max(known[index].backward_s + recompute_s, in_s)
        walk.recompute_s += recompute_s
    walk.host *= flight
    walk.disk *= flight
    walk.rounding = _rounding(known[first:last], plan.layers[first:last])
    return walk


def _rounding(known: Sequence[LayerProfile], plans: Sequence[LayerPlan]) -> float:
    """A page for each storage; and where some layer goes to two places, one storage that does not fit into the first."""
    divided = any(0 < max(plan.kept, plan.host, plan.disk) < 1 for plan in plans)
    largest = max((layer.largest_storage_bytes for layer in known), default=0)
    return sum(4096 * layer.storages for layer in known) + (largest if divided else 0)


def _stands(walk: _Walk, nbytes: float, layer: int | None) -> None:
    if nbytes > walk.peak:
        walk.peak, walk.peak_layer = nbytes, layer


def _saved(layer: LayerProfile, plan: LayerPlan) -> float:
    at = {level.level.value: level.saved_bytes for level in layer.levels}
    fractions = zip(("all", "matmuls", "attention"), plan.token_fractions, strict=True)
    return layer.always_bytes + layer.other_bytes + sum(at.get(name, 0) * fraction for name, fraction in fractions)


def _whole(layer: LayerProfile, plan: LayerPlan) -> float:
    """As the layer's own forward and backward have it: all that autograd saves, and what its recompute is given."""
    given = {level.level.value: level.beside_bytes for level in layer.levels}
    fractions = zip(("all", "matmuls", "attention"), plan.token_fractions, strict=True)
    return layer.full_bytes + sum(given.get(name, 0) * fraction for name, fraction in fractions)


def _moved(layer: LayerProfile, plan: LayerPlan) -> tuple[float, float]:
    saved = _saved(layer, plan)
    return saved * plan.host, saved * plan.disk


def _copy_s(host: float, disk: float, link_rate: float, disk_rate: float) -> float:
    """Both kinds cross the link at once, each with half of it or as fast as its end takes them."""
    if host + disk == 0:
        return 0.0
    disk_share = min(disk_rate, link_rate / 2) if host else min(disk_rate, link_rate)
    host_share = link_rate - disk_share if disk else link_rate
    first = min(host / host_share if host else 0.0, disk / disk_share if disk else 0.0) if host and disk else 0.0
    host, disk = host - first * host_share, disk - first * disk_share
    return first + max(host / link_rate if host > 0 else 0.0, disk / min(disk_rate, link_rate) if disk > 0 else 0.0)


def _device(plan: ActivationPlan, walks: list[_Walk]) -> Violation | None:
    budget = plan.problem.budgets.device_bytes
    for walk in walks:
        if walk.peak > budget + 0.5:
            where = "an end of the model" if walk.peak_layer is None else f"layer {walk.peak_layer}"
            message = f"{walk.peak:.0f} bytes at {where} are {walk.peak - budget:.0f} above the budget of {budget}"
            return Violation(rule=Rule.DEVICE, message=message, layer=walk.peak_layer)
    return None


def _shared(plan: ActivationPlan, walks: list[_Walk]) -> Violation | None:
    """What the ranks of each node use together."""
    budgets, pipeline = plan.problem.budgets, plan.problem.pipeline
    together = pipeline.stages_per_node
    step_s = pipeline.microbatches * max(walk.clock_s for walk in walks)  # no step is shorter
    ranks = budgets.ranks_per_node / together
    for first in range(0, len(walks), together):
        node = walks[first : first + together]
        for rule, moved, budget in (
            (Rule.HOST, [walk.host for walk in node], budgets.host_bytes),
            (Rule.DISK, [walk.disk for walk in node], budgets.disk_bytes),
        ):
            used = ranks * sum(
                nbytes + walk.flight * walk.rounding for nbytes, walk in zip(moved, node, strict=True) if nbytes
            )
            if used > budget + 0.5:
                message = f"{used:.0f} bytes on a node are {used - budget:.0f} above its {rule} budget of {budget}"
                rounded = ", rounded to whole storages and pages" if any(walk.rounding for walk in node) else ""
                return Violation(rule=rule, message=f"{message} ({format_bytes(budget)}){rounded}")
        wear = budgets.disk_wear_bytes_per_day
        a_day = ranks * pipeline.microbatches * sum(walk.disk / walk.flight for walk in node)
        a_day *= SECONDS_A_DAY / step_s if step_s else 0.0
        if wear is not None and a_day > wear * (1 + 1e-9) + 1:
            message = f"{a_day:.4g} bytes a day are written to a node's disks, above the {wear:.4g} allowed"
            return Violation(rule=Rule.WEAR, message=message)
    return None


def _prediction(plan: ActivationPlan, walks: list[_Walk]) -> Violation | None:
    microbatches = plan.problem.pipeline.microbatches
    for number, (walk, stage) in enumerate(zip(walks, plan.stages, strict=True)):
        for name, claimed, found in (
            ("microbatch_s", stage.microbatch_s, walk.clock_s),
            ("recompute_s", stage.recompute_s, walk.recompute_s),
            ("peak_device_bytes", stage.peak_device_bytes, walk.peak),
            ("peak_host_bytes", stage.peak_host_bytes, walk.host),
            ("peak_disk_bytes", stage.peak_disk_bytes, walk.disk),
            ("disk_written_bytes", stage.disk_written_bytes, walk.disk / walk.flight * microbatches),
        ):
            slack = 1e-9 if name.endswith("_s") else len(plan.layers)
            if abs(claimed - found) > PREDICTION_TOLERANCE * abs(found) + slack:
                message = f"stage {number} claims {name} {claimed:.6g}, but the plan's rules give {found:.6g}"
                return Violation(rule=Rule.PREDICTION, message=message)
    return None
