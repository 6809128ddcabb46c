"""The face of activation planning: `plan_activations` gives a checked plan or says what would fit.

Owns the order of the work: keep everything where that fits, else solve, round token ranges to what a runtime can cut,
predict, and have the result checked. A plan that the independent checker refuses never leaves here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from memo.errors import Infeasible
from memo.mip.activation.bottlenecks import Limit, Resource
from memo.mip.activation.checker import require_valid
from memo.mip.activation.cost import predict_stages
from memo.mip.activation.linear_program import Model, Sharing
from memo.mip.activation.plan import (
    ActivationPlan,
    ActivationProblem,
    LayerPlan,
)
from memo.mip.activation.rounding import in_tiles
from memo.mip.inputs.profile import LayerProfile, Profile
from memo.units import format_bytes, format_duration

__all__ = ["solve_problem"]

UNIFORM_PRICE = 1e-4
"""Of a step: what treating layers alike may cost."""

GIB = 1 << 30
MOST_REASONS = 4
ALMOST_ALL = 1e-6
"""Of a layer's tokens."""
LEAST_SAVING = 1e-6
"""Of a step: what saves less is only the price that settles ties."""


def solve_problem(problem: ActivationProblem) -> ActivationPlan:
    """Finds the plan with the shortest step that the budgets allow. The same problem gives the same plan.

    Returns:
        A plan that has passed `memo.mip.activation.checker`. `declined` is set where everything fits without a plan.

    Raises:
        Infeasible: no plan fits; the message names the tier, the place, the bytes, and the smallest budgets that would do.
        SolverFailed: the solver crashed.
    """
    kept = _keep_all(problem)
    if kept is not None:
        return kept
    model = _best_model(problem)
    layers, stages = in_tiles(problem, model.layer_plans())
    plan = ActivationPlan(problem=problem, layers=layers, stages=stages, binding=_reasons(model.limits(), model.step_s))
    require_valid(plan)
    return plan


def _best_model(problem: ActivationProblem) -> Model:
    """Layers are treated alike unless that costs more than nothing to speak of."""
    models = [model for staying in _ways(problem) for model in _models(problem, staying)]
    solved = [model for model in models if model.solve()]
    if not solved:
        raise Infeasible(_what_would_fit(problem))
    exact = min(solved, key=lambda model: model.step_s * (1 if model.staying is None else 1 + LEAST_SAVING))
    if not exact.shares:
        return exact
    uniform = Model(exact.problem, sharing=Sharing.UNIFORM, staying=exact.staying)
    return uniform if uniform.solve() and uniform.step_s <= exact.step_s * (1 + UNIFORM_PRICE) else exact


def _models(problem: ActivationProblem, staying: int | None) -> Iterator[Model]:
    """The program; and where something is gathered of layers that are divided alone, one that knows which layers are not.

    A linear program cannot say that nothing stands beside a layer when all of its tokens are saved, and nearly all of it
    when all but a few are. Which layers it would leave whole is found as if nothing were gathered.
    """
    yield Model(problem, staying=staying)
    if not _gathers(problem.profile):
        return
    layers = problem.profile.layer_profiles()
    free = Model(_with_layers(problem, [_gathering_nothing(layer) for layer in layers]), staying=staying)
    if free.solve():
        plans = zip(layers, free.layer_plans(), strict=True)
        known = [_undivided(layer) if plan.all_tokens >= 1 - ALMOST_ALL else layer for layer, plan in plans]
        yield Model(_with_layers(problem, known), staying=staying)


def _gathers(profile: Profile) -> bool:
    return any(layer.levels[0].beside_bytes for layer in profile.classes)


def _gathering_nothing(layer: LayerProfile) -> LayerProfile:
    return dataclasses.replace(layer, levels=(dataclasses.replace(layer.levels[0], beside_bytes=0), *layer.levels[1:]))


def _undivided(layer: LayerProfile) -> LayerProfile:
    """All of its tokens are saved."""
    whole = _gathering_nothing(layer)
    return dataclasses.replace(whole, name=f"{layer.name}, whole", levels=whole.levels[:1])


def _with_layers(problem: ActivationProblem, layers: Sequence[LayerProfile]) -> ActivationProblem:
    classes = {layer.name: layer for layer in layers}
    names = tuple(layer.name for layer in layers)
    profile = dataclasses.replace(problem.profile, classes=tuple(classes.values()), layers=names)
    return dataclasses.replace(problem, profile=profile)


def _ways(problem: ActivationProblem, relaxed: Resource | None = None) -> list[int | None]:
    """How many layers may stay whole, or None: where none is divided, rounding takes less of the tier, if there is but one.

    Two layers stand at the end of the forward whatever the plan is.
    """
    budgets = {Resource.HOST: problem.budgets.host_bytes, Resource.DISK: problem.budgets.disk_bytes}
    tiers = sum(nbytes > 0 or tier is relaxed for tier, nbytes in budgets.items())
    rounds = any(layer.largest_storage_bytes for layer in problem.profile.classes)
    return [None, 1, 2] if tiers == 1 and rounds else [None]


def _keep_all(problem: ActivationProblem) -> ActivationPlan | None:
    """The plan that does nothing, where nothing has to be done."""
    layers = tuple(LayerPlan() for _ in problem.profile.layers)
    stages = predict_stages(problem, layers)
    peak, budget = max(stage.peak_device_bytes for stage in stages), problem.budgets.device_bytes
    if peak > budget:
        return None
    declined = f"fits in {format_bytes(peak)} of {format_bytes(budget)}"
    plan = ActivationPlan(problem=problem, layers=layers, stages=stages, declined=declined)
    require_valid(plan)
    return plan


def _reasons(limits: list[Limit], step_s: float) -> tuple[str, ...]:
    """In words, each kind of row once, the weightiest first."""
    saving: dict[tuple[Resource, str], float] = {}
    for limit in limits:
        key = (limit.resource, limit.where)
        saving[key] = saving.get(key, 0.0) + limit.saving
    ranked = sorted(saving.items(), key=lambda item: (-_worth(item[0][0], item[1]), item[0]))
    worthy = [item for item in ranked if _worth(item[0][0], item[1]) > LEAST_SAVING * step_s]
    return tuple(_reason(*key, worth) for key, worth in worthy[:MOST_REASONS])


def _worth(resource: Resource, saving: float) -> float:
    """Comparable figures of unlike rows: a GiB of memory, a terabyte a day, a hundredth of the windows' time."""
    if resource in (Resource.COPY_IN, Resource.COPY_OUT):
        return saving / 100
    return saving * (1e12 if resource is Resource.WEAR else GIB)


def _reason(resource: Resource, where: str, saving: float) -> str:
    if resource in (Resource.COPY_IN, Resource.COPY_OUT):
        return f"{where} is full: {resource} takes all of it"
    unit = "TB a day" if resource is Resource.WEAR else "GiB"
    worth = format_duration(_worth(resource, saving))
    name = {Resource.DEVICE: "device memory", Resource.HOST: "host memory", Resource.DISK: "disk space"}.get(resource)
    return f"{name or resource} {where} is full: a {unit} more saves {worth} a step"


def _what_would_fit(problem: ActivationProblem) -> str:
    """Which tier overflows where, by how much, and each budget that would do with the others as they are."""
    model = _least_excess(problem, Resource.DEVICE)
    assert model is not None
    budgets = problem.budgets
    excess = math.ceil(model.excess_bytes)
    where = next((limit.where for limit in model.limits() if limit.resource is Resource.DEVICE), "in all")
    words = (
        f"no plan fits: the device lacks {excess} bytes ({format_bytes(excess)}) {where}; the smallest device budget "
        f"that fits is {budgets.device_bytes + excess} bytes ({format_bytes(budgets.device_bytes + excess)})"
    )
    for tier, budget in ((Resource.HOST, budgets.host_bytes), (Resource.DISK, budgets.disk_bytes)):
        model = _least_excess(problem, tier)
        if model is not None:
            least = budget + math.ceil(model.excess_bytes)
            words += f"; or a {tier} budget of {least} bytes ({format_bytes(least)}) a node"
    return words


def _least_excess(problem: ActivationProblem, tier: Resource) -> Model | None:
    """The program that needs least beyond one tier's budget; None where more of it would not help."""
    variants = [problem]
    if _gathers(problem.profile):
        variants.append(_with_layers(problem, [_undivided(layer) for layer in problem.profile.layer_profiles()]))
    models = [Model(one, staying=staying, relaxed=tier) for one in variants for staying in _ways(problem, tier)]
    return min((model for model in models if model.solve()), key=lambda model: model.excess_bytes, default=None)
