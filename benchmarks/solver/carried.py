"""Six problems carried out: real copies, waits and recomputes on the paced CPU engine, each rule's plan in turn."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from benchmarks.plan_accuracy import LAYERS, Bench, Case
from benchmarks.solver.rules import RULES
from memo.autoplan.actuator import Actuator
from memo.autoplan.controller import AutoPlan
from memo.autoplan.device_budget import DeviceBudget
from memo.manager.manager import Manager
from memo.manager.plan_source import checked_plan
from memo.mip.activation.plan import ActivationPlan, ActivationProblem, LayerPlan

__all__ = ["carried"]

CASES = [
    Case(tokens=512, link_bytes_per_s=link, device_layers=budget, host_layers=LAYERS)
    for link in (30e6, 120e6, 480e6)
    for budget in (3.2, 5.5)
]
"""A layer's tensors take .21, .052 and .013 s over these links, and its forward some .03 s."""


def carried(rounds: int) -> Iterator[dict[str, Any]]:
    """A row for each problem: measured medians of each rule, and all rounds."""
    for case in CASES:
        bench = Bench(case)
        problem = _problem(bench)
        managers: dict[str, Manager] = {}
        predicted: dict[str, float] = {}
        plans: dict[str, list[str]] = {}
        for rule, choose in RULES.items():
            found = choose(problem)
            if found is not None:
                managers[rule] = _applied(bench, found.plan)
                predicted[rule] = found.step_s
                plans[rule] = [_told(layer) for layer in found.plan.layers]
        taken: dict[str, list[float]] = {rule: [] for rule in managers}
        for number in range(rounds + 2):
            for rule, manager in managers.items():
                seconds = bench.step(manager)
                if number > 1:  # the first round tries each layer's recompute out, the second one is warm
                    taken[rule].append(seconds)
        for manager in managers.values():
            manager.close()
        yield {
            "problem": str(case),
            "step_s": {rule: statistics.median(taken[rule]) if rule in taken else None for rule in RULES},
            "rounds_s": taken,
            "simulated_s": predicted,
            "plans": plans,
        }


def _told(layer: LayerPlan) -> str:
    points = ", ".join(f"{name} {share:.3f}" for name, share in layer.points.items())
    return f"{points}; kept {layer.kept:.3f}, host {layer.host:.3f}, disk {layer.disk:.3f}, piece {layer.piece:g}"


def _problem(bench: Bench) -> ActivationProblem:
    """The problem as memo measures it in the run."""
    manager, engine, tapes = bench.manager()
    memory = DeviceBudget(total_bytes=bench.case.device_bytes, peak_bytes=lambda: 0, restart=lambda: None)
    actuator = Actuator(engine, tapes, manager.layers, memory, tracer=None, link=bench.link)
    planning = AutoPlan(actuator, checked_plan, tracer=None)
    manager.plan_with(planning)
    while planning.plan is None:
        bench.step(manager)
    problem = planning.plan.problem
    manager.close()
    return problem


def _applied(bench: Bench, plan: ActivationPlan) -> Manager:
    manager, engine, tapes = bench.manager()
    memory = DeviceBudget(total_bytes=bench.case.device_bytes, peak_bytes=lambda: 0, restart=lambda: None)
    Actuator(engine, tapes, manager.layers, memory, tracer=None, link=bench.link).apply(plan)
    return manager
