"""Entry point of activation planning: `solve_problem` returns a checked plan, or raises with what would fit.

Owns the sequence: keep everything where that fits, else solve the linear program, choose the point of each layer, predict,
and check. A plan that the independent checker refuses is never returned.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from memo.errors import Infeasible
from memo.mip.activation.checker import require_valid
from memo.mip.activation.cost import predict_stages
from memo.mip.activation.layer_groups import Sharing
from memo.mip.activation.linear_program import WHOLE_GAP, Limit, PlanModel, Resource, Solution
from memo.mip.activation.memory_peaks import DeviceMemory, MemoryUse, device_peak_candidates, highest_memory
from memo.mip.activation.plan import (
    ActivationPlan,
    ActivationProblem,
    LayerPlan,
)
from memo.mip.activation.whole_points import at_points, can_round, round_points
from memo.units import format_bytes, format_duration

UNIFORM_PRICE = 1e-4
"""Fraction of a step that treating layers alike may cost."""

GIB = 1 << 30
MOST_BINDING = 4
_WINDOWS = (Resource.COPY_IN, Resource.COPY_OUT, Resource.NETWORK)
MOST_LAYERS = 16
_AT_LAYER = "at layer "
WORDS = {use: str(use).replace("_", " ") for use in MemoryUse}
LEAST_SAVING = 1e-6
"""Fraction of a step; smaller savings come from the prices that break ties."""
MOST_SAVING = 0.1
"""Fraction of a step above which what a unit more saves is named as a bound."""


class DoesNotFit(Infeasible):
    """No plan fits a problem.

    Attributes:
        problem: the problem.
        memory: what the device holds at its peak under the plan that lacks least device memory.
        least_bytes: for `device`, `host` and `disk` the smallest budget that suffices by itself; no entry where none does.
    """

    def __init__(
        self, message: str, *, problem: ActivationProblem, memory: DeviceMemory, least_bytes: Mapping[str, int]
    ) -> None:
        super().__init__(message)
        self.problem, self.memory, self.least_bytes = problem, memory, dict(least_bytes)

    def with_message(self, message: str) -> DoesNotFit:
        """Returns the answer with another message."""
        return DoesNotFit(message, problem=self.problem, memory=self.memory, least_bytes=self.least_bytes)


def solve_problem(problem: ActivationProblem) -> ActivationPlan:
    """Finds the plan with the shortest step that the budgets allow. The same problem gives the same plan.

    Returns:
        A plan that has passed `memo.mip.activation.checker`. `declined` is set where everything fits without a plan.

    Raises:
        DoesNotFit: no plan fits; the message names the tier, the place, the bytes, and the smallest sufficient budgets.
        SolverFailed: the solver crashed.
    """
    plan = find_plan(problem)
    if plan is None:
        raise misfit_of(problem)
    return plan


def find_plan(problem: ActivationProblem) -> ActivationPlan | None:
    """The plan of `solve_problem`; None where no plan fits, without the time to find out by how much.

    Raises:
        SolverFailed: the solver crashed.
    """
    kept = _keep_all(problem)
    if kept is not None:
        return kept
    for each in _with_and_without_overlap(problem):
        if _has_room(each) and (found := _whole_layers(each)) is not None:
            break
    else:
        return None
    problem = each
    plan, kept = _predicted(problem, found.layers), _predicted(problem, _everything_kept(problem))
    binding = _binding_texts(found.limits, found.step_s, added_s=plan.step_s - kept.step_s)
    plan = dataclasses.replace(plan, binding=binding)
    require_valid(plan)
    return plan


def relaxed_step_s(problem: ActivationProblem) -> float | None:
    """A lower bound of the step under any plan, by the linear program with each layer free to mix its points.

    Nothing is rounded. In a pipeline only its slowest stage counts.

    Returns:
        Seconds; None where not even this has a solution.

    Raises:
        SolverFailed: the solver crashed.
    """
    last = problem.update
    for each in _with_and_without_overlap(problem):
        model = PlanModel(each, sharing=Sharing.NONE, bound=True)
        if model.solve():
            return model.step_s + last.optimizer_s + last.optimizer_exchange_s
    return None


def fits(problem: ActivationProblem) -> bool:
    """Whether `solve_problem` finds a plan; takes a part of its time, since any plan will do."""
    if _keep_all(problem) is not None:
        return True
    return any(_has_room(each) and _has_plan(each) for each in _with_and_without_overlap(problem))


def _has_plan(problem: ActivationProblem) -> bool:
    solved = [model for staying in _staying_options(problem) if (model := PlanModel(problem, staying=staying)).solve()]
    return any(can_round(model) for model in solved) or any(
        True for _ in _integral(problem, [model.staying for model in solved])
    )


def _with_and_without_overlap(problem: ActivationProblem) -> Iterator[ActivationProblem]:
    """The problem, then, for where that has no plan, the one in which compute waits for each copy."""
    yield problem
    if (other := problem.without_overlap) is not problem:
        yield other


def _has_room(problem: ActivationProblem) -> bool:
    """Whether each device has room for what every plan holds at its fullest moment."""
    return all(
        place.resident_bytes <= stage.machine.budgets.device_bytes
        for stage in problem.stages
        for place in device_peak_candidates(stage)
    )


def _solved(problem: ActivationProblem, **how: Any) -> list[PlanModel]:
    """The solved programs with each value of `staying` that may have the shortest step."""
    solved: list[PlanModel] = []
    for staying in _staying_options(problem):
        if solved and staying is not None and not any(model.tiers_bind for model in solved):
            break  # rounding takes less of the tiers then, and there is enough of them
        model = PlanModel(problem, staying=staying, **how)
        if model.solve():
            solved.append(model)
    return solved


def _best_model(problem: ActivationProblem) -> PlanModel | None:
    """The solved program with the shortest step; one with equal layers treated alike, if that costs next to nothing."""
    solved = _solved(problem)
    if not solved:
        return None
    exact = min(solved, key=lambda model: model.priced_s * (1 if model.staying is None else 1 + LEAST_SAVING))
    if not exact.shares:
        return exact
    uniform = PlanModel(problem, sharing=Sharing.UNIFORM, staying=exact.staying)
    return uniform if uniform.solve() and uniform.step_s <= exact.step_s * (1 + UNIFORM_PRICE) else exact


def _whole_layers(problem: ActivationProblem) -> Solution | None:
    """The solution in which each layer is at one point; None where none was found.

    Fractions are rounded, and where that costs more than WHOLE_GAP or fails a program with integers is asked.
    """
    model = _best_model(problem)
    if model is None:
        return None
    found = round_points(model)
    if found is None:
        options = sorted(_staying_options(problem), key=lambda staying: staying != model.staying)
        found = next(_integral(problem, options), None)
    elif found.objective > model.objective * (1 + WHOLE_GAP):
        found = min([found, *_integral(problem, [model.staying])], key=lambda each: each.step_s)
    # With points given, more of a resource would leave them as they are: the fractions say what it is worth.
    return None if found is None else dataclasses.replace(found, limits=tuple(model.limits()))


def _integral(
    problem: ActivationProblem, options: Iterable[int | None], relaxed: Resource | None = None
) -> Iterator[Solution]:
    """Solutions of programs with integers, with these values of `staying`."""
    for staying in options:
        whole = PlanModel(problem, staying=staying, relaxed=relaxed, whole=True)
        if whole.solve() and (given := at_points(whole)) is not None:
            yield given


def _staying_options(problem: ActivationProblem, relaxed: Resource | None = None) -> list[int | None]:
    """Values of `staying` to try: with a single tier, rounding takes less of it where no layer is divided.

    Two layers are on the device at the end of the forward under any plan, so at most two are tried.
    """
    every = [stage.machine.budgets for stage in problem.stages]
    budgets = {
        Resource.HOST: max(budgets.host_bytes for budgets in every),
        Resource.DISK: max(budgets.disk_bytes for budgets in every),
    }
    tiers = sum(nbytes > 0 or tier is relaxed for tier, nbytes in budgets.items())
    rounds = any(layer.largest_storage_bytes for layer in problem.profile.classes)
    return [None, 1, 2] if tiers == 1 and rounds else [None]


def _keep_all(problem: ActivationProblem) -> ActivationPlan | None:
    """The plan that keeps everything, if that fits; else None."""
    plan = _predicted(problem, _everything_kept(problem))
    held = [
        (predicted.peak_device_bytes, stage.machine.budgets.device_bytes)
        for predicted, stage in zip(plan.stages, problem.stages, strict=True)
    ]
    if any(peak > budget for peak, budget in held):
        return None
    peak, budget = max(held, key=lambda pair: pair[0] - pair[1]) if problem.machines else max(held)
    declined = f"fits in {format_bytes(peak)} of {format_bytes(budget)}"
    plan = dataclasses.replace(plan, declined=declined)
    require_valid(plan)
    return plan


def _everything_kept(problem: ActivationProblem) -> tuple[LayerPlan, ...]:
    return (LayerPlan(),) * len(problem.profile.layers)


def _predicted(problem: ActivationProblem, layers: tuple[LayerPlan, ...]) -> ActivationPlan:
    """These layers as a plan, with the prediction of its stages."""
    return ActivationPlan(problem=problem, layers=layers, stages=predict_stages(problem, layers))


def _binding_texts(limits: Iterable[Limit], step_s: float, *, added_s: float) -> tuple[str, ...]:
    """Texts of the binding rows, one for each kind of row, the most valuable first.

    Args:
        limits: the binding rows.
        step_s: the step by the plan.
        added_s: the part of it that goes with everything kept, which no budget saves more than.
    """
    saving: dict[tuple[Resource, str], float] = {}
    for limit in limits:
        key = (limit.resource, limit.where)
        saving[key] = saving.get(key, 0.0) + limit.saving
    worthy = {key: value for key, value in saving.items() if _worth(key[0], value) > LEAST_SAVING * step_s}
    device = {key: worthy.pop(key) for key in list(worthy) if key[0] is Resource.DEVICE}
    if device:  # a larger budget loosens all of them at once
        worthy[Resource.DEVICE, _places([where for _, where in device])] = sum(device.values())
    ranked = sorted(worthy.items(), key=lambda item: (-_worth(item[0][0], item[1]), item[0]))
    return tuple(_binding_text(*key, value, step_s, added_s) for key, value in ranked[:MOST_BINDING])


def _places(where: list[str]) -> str:
    """Joins places on the device, such as `at layer 3`: the layers' numbers in order, then the embedding or the head."""
    numbers = sorted({int(place.removeprefix(_AT_LAYER)) for place in where if place.startswith(_AT_LAYER)})
    others = sorted({place for place in where if not place.startswith(_AT_LAYER)})
    if numbers:
        shown = ", ".join(map(str, numbers[:MOST_LAYERS])) + (", ..." if len(numbers) > MOST_LAYERS else "")
        others.insert(0, f"at layer{'s' * (len(numbers) > 1)} {shown}")
    return " and ".join(others)


def _worth(resource: Resource, saving: float) -> float:
    """Seconds a step per GiB of memory, per terabyte a day, or per hundredth of the windows' time, for comparison."""
    if resource in _WINDOWS:
        return saving / 100
    return saving * (1e12 if resource is Resource.WEAR else GIB)


def _binding_text(resource: Resource, where: str, saving: float, step_s: float, added_s: float) -> str:
    """Text of a binding row. Later bytes save no more than the first one, so a large saving is named as a bound."""
    if resource in _WINDOWS:
        return f"{where} is full: {resource} takes all of it"
    unit = "TB a day" if resource is Resource.WEAR else "GiB"
    worth = _worth(resource, saving)
    saves = format_duration(worth) if worth <= MOST_SAVING * step_s else f"up to {format_duration(min(worth, added_s))}"
    name = {Resource.DEVICE: "device memory", Resource.HOST: "host memory", Resource.DISK: "disk space"}.get(resource)
    return f"{name or resource} {where} is full: a {unit} more saves {saves} a step"


def misfit_of(problem: ActivationProblem) -> DoesNotFit:
    """Says where the device overflows, by how much, with what, and each budget that would suffice by itself."""
    problem = problem.without_overlap
    found = _least_excess(problem, Resource.DEVICE)
    assert found is not None
    memory = highest_memory(problem, found.layers)
    budgets = problem.machine_of(memory.stage).budgets
    excess = max(math.ceil(found.objective), 1)
    least = {"device": budgets.device_bytes + excess}
    where = next((limit.where for limit in found.limits if limit.resource is Resource.DEVICE), "in all")
    of = f" of stage {memory.stage}, {problem.machine_of(memory.stage).hardware.name}," if problem.machines else ""
    words = (
        f"no plan fits: the device{of} lacks {format_bytes(excess, up=True)} {where}, {_largest(memory)}; the smallest "
        f"device budget that fits is {format_bytes(least['device'], up=True)}"
    )
    for tier, budget in ((Resource.HOST, budgets.host_bytes), (Resource.DISK, budgets.disk_bytes)):
        found = _least_excess(problem, tier)
        if found is not None:
            least[str(tier)] = budget + math.ceil(found.objective)
            words += f"; or a {tier} budget of {format_bytes(least[str(tier)], up=True)} a node"
    return DoesNotFit(words, problem=problem, memory=memory, least_bytes=least)


def _largest(memory: DeviceMemory) -> str:
    """The largest item of a device's memory, in words."""
    total = format_bytes(memory.nbytes)
    if memory.static_bytes > memory.nbytes / 2:
        static = format_bytes(memory.static_bytes)
        return f"of {total} {static} are weights, gradients and optimizer state"
    use = max(memory.uses, key=lambda use: memory.uses[use])
    return f"of {total} {format_bytes(memory.uses[use])} are {WORDS[use]}"


def _least_excess(problem: ActivationProblem, tier: Resource) -> Solution | None:
    """The solution with the least excess over one tier's budget; None where a larger budget would not help."""
    programs = [PlanModel(problem, staying=staying, relaxed=tier) for staying in _staying_options(problem, tier)]
    solved = [model for model in programs if model.solve()]
    rounded = [found for model in solved if (found := round_points(model)) is not None]
    given = _integral(problem, [model.staying for model in solved], relaxed=tier)
    return min([*rounded, *given], key=lambda one: one.objective, default=None)
