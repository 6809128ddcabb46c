"""Entry point of activation planning: `solve_problem` returns a checked plan, or raises with what would fit.

Owns the sequence: keep everything where that fits, else solve the linear program for ever smaller pieces of tokens until
they gain nothing, choose the points of layers that cannot be divided, round token ranges to what the runtime can cut,
predict, and check. A plan that the independent checker refuses is never returned.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from memo.errors import Infeasible
from memo.mip.activation.checker import check_plan, require_valid
from memo.mip.activation.cost import predict_stages
from memo.mip.activation.linear_program import WHOLE_GAP, Limit, Model, Resource, Sharing
from memo.mip.activation.memory_peaks import DeviceMemory, Use, device_peak_candidates, highest_memory
from memo.mip.activation.plan import (
    ActivationPlan,
    ActivationProblem,
    LayerPlan,
)
from memo.mip.activation.rounding import in_storages, in_tiles, piece_candidates
from memo.mip.activation.whole_points import at_points, round_points
from memo.mip.inputs.coded_classes import undivided, with_most_spared, with_share
from memo.mip.inputs.coding import Coding
from memo.mip.inputs.profile import ALL, LayerProfile, Profile
from memo.units import format_bytes, format_duration

__all__ = ["DoesNotFit", "find_plan", "fits", "misfit_of", "relaxed_step_s", "solve_problem"]

UNIFORM_PRICE = 1e-4
"""Fraction of a step that treating layers alike may cost."""

GIB = 1 << 30
MOST_BINDING = 4
_WINDOWS = (Resource.COPY_IN, Resource.COPY_OUT, Resource.NETWORK)
MOST_LAYERS = 16
_AT_LAYER = "at layer "
ALMOST_ALL = 1e-6
"""Fraction of a layer above which all of it is taken to be saved."""
MOST_VARIANTS = 4
"""Variants of a problem with a codec that are solved."""
MOST_IN_VAIN = 2
"""Sizes of pieces in a row that gain nothing until no smaller one is tried."""
WORDS = {use: str(use).replace("_", " ") for use in Use}
LEAST_SAVING = 1e-6
"""Fraction of a step; smaller savings come from the prices that break ties."""


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
    if not _has_room(problem):
        return None
    best = _coded(problem) if _is_coded(problem) else _found(problem)
    if best is not None:
        require_valid(best)
    return best


def _coded(problem: ActivationProblem) -> ActivationPlan | None:
    """The shortest plan of some variants of a problem with a codec (memo.mip.inputs.coded_classes).

    First each layer is free, and a recomputed one thought to move whole and to take the time of coding; then none
    recomputes, so that every share is exact; then what the best answer left whole is left whole, and others take the share
    found there.
    """
    best: ActivationPlan | None = None
    variants = [problem, _with_classes(problem, undivided)]
    for tried in range(MOST_VARIANTS):
        if tried >= len(variants):
            break
        found = _found(variants[tried])
        if found is None:
            continue
        stages = predict_stages(problem, found.layers)
        plan = dataclasses.replace(found, problem=problem, stages=stages)
        if check_plan(plan) is None and (best is None or plan.step_s < best.step_s * (1 - LEAST_SAVING)):
            best = plan
            if tried or plan.layers != (LayerPlan(),) * len(plan.layers):
                variants.append(_as_found(problem, plan.layers))
    return best


def _found(problem: ActivationProblem) -> ActivationPlan | None:
    """The plan of one program after another, before it is checked; None where none fits."""
    smaller = list(piece_candidates(problem))
    model = _best_model(problem, {})
    if model is None and not (smaller and _best_model(problem, smaller[-1])):
        return None  # the smallest hold least
    best, in_vain = _rounded(problem, model), 0
    for pieces in smaller:
        if best is not None and not _is_bound(best, pieces):
            continue
        further = _best_model(problem, pieces, limit_s=_limit_s(best, model))
        plan, model = _rounded(problem, further), further or model
        if best is None or (plan is not None and plan.step_s < best.step_s * (1 - LEAST_SAVING)):
            best, in_vain = plan, 0
            continue
        in_vain += 1
        if in_vain == MOST_IN_VAIN:
            break
    if best is None:
        return None
    for whole in _whole_layers(best):
        if whole.step_s < best.step_s * (1 - LEAST_SAVING):
            best = whole
    return best


def _whole_layers(best: ActivationPlan) -> Iterator[ActivationPlan]:
    """Plans that leave whole the layers whose dividing takes time, which no row of the linear program knows.

    Each of these layers is at one point, and moves whole storages: as many as the next forward hides, or as many as gain.
    """
    problem = best.problem
    known = problem.profile.layer_profiles()
    if not any(layer.divided_s and len(plan.points) > 1 for layer, plan in zip(known, best.layers, strict=True)):
        return
    for hides in (True, False):
        solved = [
            model
            for staying in _staying_options(problem)
            if (model := Model(problem, staying=staying, hides_storages=hides, leaves_whole=True)).solve()
        ]
        for model in solved:
            found = round_points(model)
            if found is None:
                continue
            layers, _ = in_tiles(problem, found.layer_plans())
            for rounded in (in_storages(problem, layers), layers):
                plan = ActivationPlan(
                    problem=problem,
                    layers=rounded,
                    stages=predict_stages(problem, rounded),
                    binding=_binding_texts(found.limits(), found.step_s),
                )
                if check_plan(plan) is None:
                    yield plan
                    break


def relaxed_step_s(problem: ActivationProblem) -> float | None:
    """A lower bound of the step under any plan, by the linear program with each layer free to mix its points.

    Nothing is rounded, a recompute holds nothing, and neither pieces nor dividing a layer take time. The bound is of the
    planner's rules, on one pipeline stage; with several it is the program's objective.

    Returns:
        Seconds; None where not even this has a solution.

    Raises:
        SolverFailed: the solver crashed.
    """
    free = _with_classes(
        problem,
        lambda layer: dataclasses.replace(
            with_most_spared(_without_held(_without_beside(layer))),
            piece_s=0.0,
            coding=_free(layer.coding),
        ),
    )
    model = Model(free, sharing=Sharing.NONE, bounds=True)
    if not model.solve():
        return None
    return model.step_s + problem.profile.optimizer_s + problem.profile.optimizer_exchange_s


def fits(problem: ActivationProblem) -> bool:
    """Whether `solve_problem` finds a plan; takes a part of its time, since any plan will do.

    Recomputes in the smallest pieces hold least, so they are tried first, and with whole ranges last.
    """
    if not _has_room(problem):
        return False
    if _keep_all(problem) is not None:
        return True
    smallest = list(piece_candidates(problem))[-1:]
    if any(_has_plan(problem, pieces) for pieces in (*smallest, {})):
        return True
    return _is_coded(problem) and _has_plan(_with_classes(problem, undivided), {})


def _has_room(problem: ActivationProblem) -> bool:
    """Whether each device has room for what every plan holds at its fullest moment."""
    return all(
        place.resident_bytes <= problem.machine_of(stage).budgets.device_bytes
        for stage in range(problem.pipeline.stages)
        for place in device_peak_candidates(problem, stage)
    )


def _has_plan(problem: ActivationProblem, pieces: Mapping[str, float]) -> bool:
    if not _divisible(problem):
        return _rounded(problem, _best_model(problem, pieces)) is not None
    options = _staying_options(problem)
    return any(model.solve() for staying in options for model in _models(problem, staying, pieces))


def _rounded(problem: ActivationProblem, model: Model | None) -> ActivationPlan | None:
    """The plan of a solved program; None if no layer's point can be chosen, or there is no program."""
    if model is not None:
        model = _with_whole_points(problem, model)
    if model is None:
        return None
    layers, stages = in_tiles(problem, model.layer_plans())
    return ActivationPlan(
        problem=problem, layers=layers, stages=stages, binding=_binding_texts(model.limits(), model.step_s)
    )


def _is_bound(plan: ActivationPlan, pieces: Mapping[str, float]) -> bool:
    """Whether some recompute of a plan computes more tokens at once than these pieces have."""
    names = plan.problem.profile.layers
    ranges = (
        (name, share)
        for name, own in zip(names, plan.layers, strict=True)
        for point, share in own.points.items()
        if point != ALL
    )
    return any(share > pieces.get(name, 1.0) for name, share in ranges)


def _limit_s(best: ActivationPlan | None, model: Model | None) -> float:
    """Seconds that a program with smaller pieces has to undercut: those of the best plan, or of its program.

    A pipeline's program is no bound on the predicted step, so that it is compared with programs alone.
    """
    if best is None or model is None:
        return math.inf
    profile, pipeline = best.problem.profile, best.problem.pipeline
    if pipeline.stages > 1:
        return model.priced_s if _divisible(best.problem) else math.inf
    return best.step_s * (1 - LEAST_SAVING) - profile.optimizer_s - profile.optimizer_exchange_s


def _best_model(problem: ActivationProblem, pieces: Mapping[str, float], *, limit_s: float = math.inf) -> Model | None:
    """The solved program with the shortest step; one with equal layers treated alike, if that costs next to nothing.

    None where none has a solution, or a bound on all of them is not below `limit_s`.
    """
    solved: list[Model] = []
    for staying in _staying_options(problem):
        if solved and staying is not None and not any(model.tiers_bind for model in solved):
            break  # rounding takes less of the tiers then, and there is enough of them
        limit_s = min((model.priced_s for model in solved), default=limit_s)
        solved += [model for model in _models(problem, staying, pieces, limit_s=limit_s) if model.solve()]
    if not solved:
        return None
    exact = min(solved, key=lambda model: model.priced_s * (1 if model.staying is None else 1 + LEAST_SAVING))
    if not exact.shares:
        return exact
    uniform = Model(exact.problem, sharing=Sharing.UNIFORM, staying=exact.staying, pieces=pieces, kinds=exact.kinds)
    return uniform if uniform.solve() and uniform.step_s <= exact.step_s * (1 + UNIFORM_PRICE) else exact


def _with_whole_points(problem: ActivationProblem, model: Model) -> Model | None:
    """The solved program in which each layer that cannot be divided is at one point; None where none was found.

    Fractions are rounded, and where that costs more than WHOLE_GAP or fails a program with integers is asked.
    """
    if _divisible(problem):
        return model
    found = round_points(model)
    if found is not None and found.objective <= model.objective * (1 + WHOLE_GAP):
        return found
    programs = [model] if found is not None else _programs(problem, model.pieces)
    models = (Model(one.problem, staying=one.staying, whole=True, pieces=one.pieces) for one in programs)
    chosen = [rest for whole in models if whole.solve() and (rest := at_points(whole)).solve()]
    if found is not None:
        chosen.append(found)
    return min(chosen, key=lambda each: each.step_s, default=None)


def _programs(problem: ActivationProblem, pieces: Mapping[str, float]) -> list[Model]:
    return [model for staying in _staying_options(problem) for model in _models(problem, staying, pieces)]


def _models(
    problem: ActivationProblem, staying: int | None, pieces: Mapping[str, float], *, limit_s: float = math.inf
) -> Iterator[Model]:
    """The program, and a second one with the undivided layers fixed where these are treated as if they were divided.

    Only a divided layer has bytes beside it at point `all`, and only its recompute holds a piece: discontinuities that a
    linear program cannot express. The undivided layers are those that a program without such bytes leaves whole. What
    that one takes is a bound on both: there are none where it is not below `limit_s`.
    """
    if not (_has_beside(problem.profile) or pieces):
        yield Model(problem, staying=staying, pieces=pieces)
        return
    layers = problem.profile.layer_profiles()
    light = _with_classes(
        problem,
        lambda layer: _without_held(_without_beside(layer)) if layer.name in pieces else _without_beside(layer),
    )
    free = Model(light, staying=staying, pieces=pieces)
    if not free.solve() or free.priced_s >= limit_s:
        return
    model = Model(problem, staying=staying, pieces=pieces)
    yield model
    if model.solved and model.priced_s <= free.priced_s:
        return
    plans = zip(layers, free.layer_plans(), strict=True)
    known = [undivided(layer) if plan.fraction(ALL) >= 1 - ALMOST_ALL else layer for layer, plan in plans]
    yield Model(_with_layers(problem, known), staying=staying, pieces=pieces, kinds=problem.profile.layers)


def _free(coding: Coding | None) -> Coding | None:
    """Coding that takes no time."""
    return None if coding is None else dataclasses.replace(coding, encode_s=0.0, decode_s=0.0)


def _divisible(problem: ActivationProblem) -> bool:
    return all(layer.divisible for layer in problem.profile.classes)


def _has_beside(profile: Profile) -> bool:
    return any(layer.divisible and layer.points[0].beside_bytes for layer in profile.classes)


def _without_beside(layer: LayerProfile) -> LayerProfile:
    return dataclasses.replace(layer, points=(dataclasses.replace(layer.points[0], beside_bytes=0), *layer.points[1:]))


def _without_held(layer: LayerProfile) -> LayerProfile:
    return dataclasses.replace(layer, points=tuple(dataclasses.replace(point, held_bytes=0) for point in layer.points))


def _is_coded(problem: ActivationProblem) -> bool:
    """Whether codes spare bytes of any layer."""
    return any(layer.spared_bytes({ALL: 1.0}) for layer in problem.profile.classes)


def _as_found(problem: ActivationProblem, plans: Sequence[LayerPlan]) -> ActivationProblem:
    """The problem with whole classes for layers that these plans leave whole, and with the least share found for others."""
    known = problem.profile.layer_profiles()
    shares: dict[str, float] = {}
    for layer, plan in zip(known, plans, strict=True):
        if plan.recomputes:
            shares[layer.name] = min(shares.get(layer.name, 1.0), plan.coded_share(layer))
    return _with_layers(
        problem,
        [
            with_share(layer, shares[layer.name]) if plan.recomputes else undivided(layer)
            for layer, plan in zip(known, plans, strict=True)
        ],
    )


def _with_classes(problem: ActivationProblem, changed: Callable[[LayerProfile], LayerProfile]) -> ActivationProblem:
    """The problem with each class changed."""
    profile = problem.profile
    classes = {layer.name: changed(layer) for layer in profile.classes}
    profile = dataclasses.replace(
        profile, classes=tuple(classes.values()), layers=tuple(classes[name].name for name in profile.layers)
    )
    return dataclasses.replace(problem, profile=profile)


def _with_layers(problem: ActivationProblem, layers: Sequence[LayerProfile]) -> ActivationProblem:
    """The problem with these classes of its layers; of one name are equal ones."""
    classes = {layer.name: layer for layer in layers}
    names = tuple(layer.name for layer in layers)
    profile = dataclasses.replace(problem.profile, classes=tuple(classes.values()), layers=names)
    return dataclasses.replace(problem, profile=profile)


def _staying_options(problem: ActivationProblem, relaxed: Resource | None = None) -> list[int | None]:
    """Values of `staying` to try: with a single tier, rounding takes less of it where no layer is divided.

    Two layers are on the device at the end of the forward under any plan, so at most two are tried.
    """
    every = [problem.machine_of(stage).budgets for stage in range(problem.pipeline.stages)]
    budgets = {
        Resource.HOST: max(budgets.host_bytes for budgets in every),
        Resource.DISK: max(budgets.disk_bytes for budgets in every),
    }
    tiers = sum(nbytes > 0 or tier is relaxed for tier, nbytes in budgets.items())
    rounds = any(layer.largest_storage_bytes for layer in problem.profile.classes)
    return [None, 1, 2] if tiers == 1 and rounds else [None]


def _keep_all(problem: ActivationProblem) -> ActivationPlan | None:
    """The plan that keeps everything, if that fits; else None."""
    layers = tuple(LayerPlan() for _ in problem.profile.layers)
    stages = predict_stages(problem, layers)
    budgets = [problem.machine_of(stage).budgets.device_bytes for stage in range(len(stages))]
    held = [(stage.peak_device_bytes, budget) for stage, budget in zip(stages, budgets, strict=True)]
    if any(peak > budget for peak, budget in held):
        return None
    peak, budget = max(held, key=lambda pair: pair[0] - pair[1]) if problem.machines else max(held)
    declined = f"fits in {format_bytes(peak)} of {format_bytes(budget)}"
    plan = ActivationPlan(problem=problem, layers=layers, stages=stages, declined=declined)
    require_valid(plan)
    return plan


def _binding_texts(limits: list[Limit], step_s: float) -> tuple[str, ...]:
    """Texts of the binding rows, one for each kind of row, the most valuable first."""
    saving: dict[tuple[Resource, str], float] = {}
    for limit in limits:
        key = (limit.resource, limit.where)
        saving[key] = saving.get(key, 0.0) + limit.saving
    worthy = {key: value for key, value in saving.items() if _worth(key[0], value) > LEAST_SAVING * step_s}
    device = {key: worthy.pop(key) for key in list(worthy) if key[0] is Resource.DEVICE}
    if device:  # a larger budget loosens all of them at once
        worthy[Resource.DEVICE, _places([where for _, where in device])] = sum(device.values())
    ranked = sorted(worthy.items(), key=lambda item: (-_worth(item[0][0], item[1]), item[0]))
    return tuple(_binding_text(*key, value) for key, value in ranked[:MOST_BINDING])


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


def _binding_text(resource: Resource, where: str, saving: float) -> str:
    if resource in _WINDOWS:
        return f"{where} is full: {resource} takes all of it"
    unit = "TB a day" if resource is Resource.WEAR else "GiB"
    worth = format_duration(_worth(resource, saving))
    name = {Resource.DEVICE: "device memory", Resource.HOST: "host memory", Resource.DISK: "disk space"}.get(resource)
    return f"{name or resource} {where} is full: a {unit} more saves {worth} a step"


def misfit_of(problem: ActivationProblem) -> DoesNotFit:
    """Says where the device overflows, by how much, with what, and each budget that would suffice by itself."""
    model = _least_excess(problem, Resource.DEVICE)
    assert model is not None
    memory = highest_memory(problem, model.layer_plans())
    budgets = problem.machine_of(memory.stage).budgets
    excess = max(math.ceil(model.excess_bytes), 1)
    least = {"device": budgets.device_bytes + excess}
    where = next((limit.where for limit in model.limits() if limit.resource is Resource.DEVICE), "in all")
    of = f" of stage {memory.stage}, {problem.machine_of(memory.stage).hardware.name}," if problem.machines else ""
    words = (
        f"no plan fits: the device{of} lacks {format_bytes(excess, up=True)} {where}, {_largest(memory)}; the smallest "
        f"device budget that fits is {format_bytes(least['device'], up=True)}"
    )
    for tier, budget in ((Resource.HOST, budgets.host_bytes), (Resource.DISK, budgets.disk_bytes)):
        model = _least_excess(problem, tier)
        if model is not None:
            least[str(tier)] = budget + math.ceil(model.excess_bytes)
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


def _least_excess(problem: ActivationProblem, tier: Resource) -> Model | None:
    """The solved program with the least excess over one tier's budget; None where a larger budget would not help."""
    *_, pieces = {}, *piece_candidates(problem)
    variants = [problem]
    if _has_beside(problem.profile) or pieces or _is_coded(problem):
        variants.append(_with_layers(problem, [undivided(layer) for layer in problem.profile.layer_profiles()]))

    def solved_programs(*, whole: bool = False) -> list[Model]:
        options = _staying_options(problem, tier)
        models = [
            Model(one, staying=staying, relaxed=tier, whole=whole, pieces=pieces)
            for one in variants
            for staying in options
        ]
        return [model for model in models if model.solve()]

    solved = solved_programs()
    if not _divisible(problem):  # solved with given points, since a program with integers has no dual values
        given = [at_points(model) for model in solved_programs(whole=True)]
        rounded = [round_points(model) for model in solved]
        solved = [model for model in rounded if model is not None] + [model for model in given if model.solve()]
    return min(solved, key=lambda model: model.excess_bytes, default=None)
