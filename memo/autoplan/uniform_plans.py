"""Plans that treat all layers alike, for budgets below what the solver can promise.

The solver counts two whole layers at any time where layers can be divided; a run that recomputes everything holds less.
Where no plan fits by that count, or those that were tried took more than the budget, the setting that was measured first
still may hold: it recomputes all but attention and moves the rest. A uniform plan is that setting with a fraction alpha of
the tokens saved whole, as `memo.offload(alpha=...)`; its memory is known from the measured step, not from the count.

Owns which alphas are tried. A plan's device budget is its own prediction, so that checker and simulator can prove the rest.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from memo.errors import Infeasible, PlanError
from memo.mip.activation import ActivationPlan, LayerPlan, check_plan, predict_stages
from memo.mip.inputs import ALL, ATTENTION

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memo.mip.activation import ActivationProblem
    from memo.mip.inputs import LayerProfile

__all__ = ["ALPHA_STEPS", "fastest_uniform_plan", "uniform_plan"]

ALPHA_STEPS = 8
"""Alpha is a multiple of 1 / ALPHA_STEPS."""
SPARED = 0.9
"""Share of the spare bytes that a larger alpha may take; the rest allows for storages that are moved whole."""


def fastest_uniform_plan(
    problem: ActivationProblem, *, spare_bytes: int, most: float = 1.0
) -> tuple[float, ActivationPlan]:
    """Returns the alpha, and its plan, that is predicted to be fastest of those that the device has room for.

    Args:
        problem: its device budget does not count.
        spare_bytes: bytes that the device had left in a step at alpha 0.
        most: the largest alpha to try. Alpha 0 is always tried.

    Raises:
        Infeasible: no division among the tiers that was tried fits them at alpha 0.
    """
    taken = max(layer.full_bytes - _lean_bytes(layer) for layer in problem.profile.layer_profiles())
    found: list[tuple[float, ActivationPlan]] = []
    for step in range(ALPHA_STEPS + 1):
        alpha = step / ALPHA_STEPS
        # While one layer is whole, the next one returns with what it saved.
        if alpha and (alpha > most or alpha * taken > SPARED * spare_bytes):
            break
        try:
            found.append((alpha, uniform_plan(problem, alpha)))
        except Infeasible:
            if not alpha:
                raise
    return min(found, key=lambda pair: pair[1].stages[0].microbatch_s)


def uniform_plan(problem: ActivationProblem, alpha: float) -> ActivationPlan:
    """Returns the plan that saves a fraction `alpha` of each layer's tokens whole, and moves as much as the tiers take.

    Raises:
        Infeasible: no division among the tiers that was tried fits them.
    """
    known = problem.profile.layer_profiles()
    points = [_points(layer, alpha) for layer in known]
    message = ""
    for kept, host, disk in _divisions(problem):
        layers = [LayerPlan(points=each, kept=kept, host=host, disk=disk) for each in points]
        layers[-1] = LayerPlan()  # needed next: never moved, and never gone
        try:
            stages = predict_stages(problem, layers)
        except PlanError as error:  # a lane without a rate: the measured step did not use it
            message = message or str(error)
            continue
        budgets = dataclasses.replace(problem.budgets, device_bytes=stages[0].peak_device_bytes)
        plan = ActivationPlan(
            problem=dataclasses.replace(problem, budgets=budgets),
            layers=tuple(layers),
            stages=stages,
            binding=(f"device memory: all layers are alike, at alpha {alpha:g}, which measured steps have room for",),
        )
        violation = check_plan(plan)
        if violation is None:
            return plan
        message = message or violation.message
    raise Infeasible(f"no plan at alpha {alpha:g}: {message}")


def _divisions(problem: ActivationProblem) -> Iterator[tuple[float, float, float]]:
    """Fractions kept, in host memory and on disk: as much as possible on the first tier, then on the next one."""
    eighths = [step / ALPHA_STEPS for step in range(ALPHA_STEPS, -1, -1)]
    if problem.budgets.host_bytes:
        yield 0.0, 1.0, 0.0
    if problem.budgets.disk_bytes:
        for host in eighths[1:] if problem.budgets.host_bytes else (0.0,):
            yield 0.0, host, 1.0 - host
    for moved in eighths[1:]:
        yield 1.0 - moved, moved if problem.budgets.host_bytes else 0.0, 0.0 if problem.budgets.host_bytes else moved


def _points(layer: LayerProfile, alpha: float) -> dict[str, float]:
    if layer.point(ATTENTION) is None:
        return {ALL: 1.0}
    if not layer.divisible:
        return {ALL: 1.0} if alpha == 1 else {ATTENTION: 1.0}
    return {ALL: alpha, ATTENTION: 1.0 - alpha}


def _lean_bytes(layer: LayerProfile) -> float:
    return LayerPlan(points=_points(layer, 0.0)).saved_bytes(layer)
