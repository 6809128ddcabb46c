"""Problems carried out: real copies, waits and recomputes on the paced CPU engine, each rule's plan in turn.

Bytes and budgets of a problem are those that memo measures in the run; the lanes have the rates at which they are paced.
Its times are medians over several rounds of two settings, which take turns: everything saved, and each layer at one point
of recompute. From a single step they would be off by as much as plans differ.

Time in which the computing thread was ready to run and had no processor, as on a machine that is shared, is taken off (Linux
counts it); and of twice as many rounds those count in which that was least, since links go on meanwhile.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from benchmarks.plan_accuracy import LAYERS, Bench, Case
from benchmarks.solver.rules import RULES
from memo.autoplan.actuator import Actuator
from memo.autoplan.controller import AutoPlan
from memo.autoplan.device_budget import DeviceBudget
from memo.events import Event, Lane, Span, Stall
from memo.manager.manager import Manager
from memo.manager.plan_source import checked_plan
from memo.mip.activation.plan import ActivationPlan, ActivationProblem, LayerPlan
from memo.mip.inputs.profile import ATTENTION, MATMULS, LayerProfile
from memo.swap import Level, setting_of
from memo.swap.backends.protocol import HostStamp
from memo.swap.engine.engine import Engine
from memo.swap.placement import Placement

_T = TypeVar("_T")

_LEVELS = {MATMULS: Level.SAVE_MATMULS, ATTENTION: Level.SAVE_ATTENTION}

CASES = [
    Case(tokens=512, link_bytes_per_s=30e6, device_layers=3.2, host_layers=LAYERS),
    Case(tokens=512, link_bytes_per_s=30e6, device_layers=5.5, host_layers=LAYERS),
    Case(tokens=512, link_bytes_per_s=480e6, device_layers=3.2, host_layers=2, disk_bytes_per_s=60e6),
    Case(tokens=512, link_bytes_per_s=120e6, device_layers=3.2, host_layers=LAYERS),
    Case(tokens=512, link_bytes_per_s=480e6, device_layers=5.5, host_layers=LAYERS),
    Case(tokens=1024, link_bytes_per_s=120e6, device_layers=5.5, host_layers=LAYERS),
]
"""A layer's tensors take .21, .052 and .013 s over these links, and its forward some .04 s."""

WARM_UP = 2
"""First steps that do not count: in one each layer's recompute is tried out, and one is warm."""
TRIED = 2
"""Rounds that are tried for each one that counts."""
APART = 0.02
"""Part of a step by which two rules' predictions differ so that their order is told."""


def carried(rounds: int) -> Iterator[dict[str, Any]]:
    """A row for each problem: measured medians of each rule, and all rounds."""
    for case in CASES:
        yield carried_out(case, rounds)


def carried_out(case: Case, rounds: int) -> dict[str, Any]:
    """The row of one problem."""
    bench = Bench(case)
    problem = _problem(bench, rounds)
    managers: dict[str, Manager] = {}
    predicted: dict[str, float] = {}
    plans: dict[str, list[str]] = {}
    for rule, choose in RULES.items():
        found = choose(problem)
        if found is not None:
            managers[rule] = _applied(bench, found.plan)
            predicted[rule] = found.step_s
            plans[rule] = [_told(layer) for layer in found.plan.layers]
    steps: list[tuple[float, dict[str, float]]] = []
    for _ in range(TRIED * rounds + WARM_UP):
        begun_ns, one = _delay_ns(), {}
        for rule, manager in managers.items():
            before_ns, seconds = _delay_ns(), bench.step(manager)
            one[rule] = seconds - (_delay_ns() - before_ns) / 1e9
        steps.append(((_delay_ns() - begun_ns) / 1e9, one))
    for manager in managers.values():
        manager.close()
    quiet = _quietest(steps[WARM_UP:], rounds)
    taken = {rule: [one[rule] for _, one in quiet] for rule in managers}
    step_s = _medians(taken)
    return {
        "problem": str(case),
        "step_s": step_s,
        "rounds_s": taken,
        "delay_s": [delay_s for delay_s, _ in quiet],
        "simulated_s": predicted,
        "measured_over_simulated": {rule: step_s[rule] / seconds for rule, seconds in predicted.items()},
        "pairs_in_order": pairs_in_order(predicted, step_s),
        "layer": dataclasses.asdict(problem.profile.layer_profiles()[0]),
        "plans": plans,
    }


def _delay_ns() -> int:
    """Nanoseconds that this thread has so far been ready to run without a processor; 0 where the system does not count."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1])
    except (OSError, IndexError):
        return 0


def _quietest(rounds: Sequence[tuple[float, _T]], count: int) -> list[tuple[float, _T]]:
    """So many of the rounds, those with the least delay, in the order in which they were run."""
    most = sorted(delay_s for delay_s, _ in rounds)[count - 1]
    return [one for one in rounds if one[0] <= most][:count]


class _Undelayed(HostStamp):
    """A stamp of a clock that stands while this thread is ready to run without a processor."""

    __slots__ = ()

    def __init__(self, stream: int | None = None) -> None:
        self.at = time.monotonic_ns() - _delay_ns()


def _medians(taken: Mapping[str, Sequence[float]]) -> dict[str, float | None]:
    """Of each rule the LP's median step, times the median of its own over the LP's of the same round."""
    base = taken["LP"]
    return {
        rule: statistics.median(base) * statistics.median(own / lp for own, lp in zip(taken[rule], base, strict=True))
        if rule in taken
        else None
        for rule in RULES
    }


def pairs_in_order(predicted: Mapping[str, float], measured: Mapping[str, float | None]) -> tuple[int, int]:
    """Of the pairs of rules whose predictions are APART, those that were measured in the order predicted, and all."""
    agreeing, pairs = 0, 0
    for one, one_s in predicted.items():
        for other, other_s in predicted.items():
            if one_s * (1 + APART) < other_s:
                before, after = measured[one], measured[other]
                assert before is not None
                assert after is not None
                agreeing, pairs = agreeing + (before < after), pairs + 1
    return agreeing, pairs


def _told(layer: LayerPlan) -> str:
    return f"{layer.point}; kept {layer.kept:.3f}, host {layer.host:.3f}, disk {layer.disk:.3f}"


def _problem(bench: Bench, rounds: int) -> ActivationProblem:
    """The problem as memo measures it in the run, with steadier times."""
    manager, engine, tapes = bench.manager()
    memory = DeviceBudget(total_bytes=bench.case.device_bytes, peak_bytes=lambda: 0, restart=lambda: None)
    actuator = Actuator(engine, tapes, manager.layers, memory, tracer=None, link=bench.link)
    planning = AutoPlan(actuator, checked_plan, tracer=None)
    manager.plan_with(planning)
    while planning.plan is None:
        bench.step(manager)
    problem = planning.plan.problem
    manager.close()
    assert isinstance(bench.case, Case)
    disk = bench.case.disk_bytes_per_s
    hardware = dataclasses.replace(problem.hardware, disk_write_bytes_per_s=disk, disk_read_bytes_per_s=disk)
    points = [known.name for known in problem.profile.classes[0].points if known.name in (MATMULS, ATTENTION)]
    times = _Times.measured(bench, points[-1], rounds)
    classes = tuple(times.of(known) for known in problem.profile.classes)
    return dataclasses.replace(
        problem, hardware=hardware, profile=dataclasses.replace(problem.profile, classes=classes)
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Times:
    """Medians over layers and steps, without waits."""

    point: str
    forward_s: float
    backward_s: float
    """Where everything is saved."""
    recompute_s: float
    """Time that a layer at `point` takes beyond that."""

    @classmethod
    def measured(cls, bench: Bench, point: str, rounds: int) -> _Times:
        """Steps of both settings in turn; everything that is saved stays, so that nothing waits for a link."""
        settings = {"saved": Level.SAVE_ALL, "again": _LEVELS[point]}
        traces = {name: _Trace() for name in settings}
        running: dict[str, tuple[Manager, Engine]] = {}
        for name, level in settings.items():
            bench.tracer, before = traces[name], bench.tracer  # type: ignore[assignment]
            manager, engine, tapes = bench.manager()
            bench.tracer = before
            engine.place(dict.fromkeys(range(len(manager.layers)), Placement(kept=1.0)))
            tapes.choose(dict.fromkeys((layer.name for layer in manager.layers), setting_of(level)))
            engine.backend.stamp = _Undelayed  # type: ignore[method-assign]
            running[name] = manager, engine
        steps: list[tuple[float, dict[str, list[float]]]] = []
        for _ in range(TRIED * rounds + WARM_UP):
            before_ns, one = _delay_ns(), {}
            for name, (manager, engine) in running.items():
                traces[name].events.clear()
                bench.step(manager)
                engine.end_step()
                one[name] = [statistics.median(column) for column in zip(*traces[name].layers(), strict=True)]
            steps.append(((_delay_ns() - before_ns) / 1e9, one))
        rounds_s = [one for _, one in _quietest(steps[WARM_UP:], rounds)]
        for manager, _ in running.values():
            manager.close()

        def longer_s(name: str) -> float:
            """Seconds of a layer beyond those where everything is saved, of the same round."""
            return max(statistics.median(sum(one[name]) - sum(one["saved"]) for one in rounds_s), 0.0)

        return cls(
            point=point,
            forward_s=statistics.median(one["saved"][0] for one in rounds_s),
            backward_s=statistics.median(one["saved"][1] for one in rounds_s),
            recompute_s=longer_s("again"),
        )

    def of(self, layer: LayerProfile) -> LayerProfile:
        """The layer with these times; other points' as they were to that of `point`."""
        known = layer.point(self.point)
        scale = self.recompute_s / known.recompute_s if known is not None and known.recompute_s else 1.0
        return dataclasses.replace(
            layer,
            forward_s=self.forward_s,
            backward_s=self.backward_s,
            points=tuple(dataclasses.replace(one, recompute_s=one.recompute_s * scale) for one in layer.points),
        )


class _Trace:
    """A trace in memory, by the monotonic clock."""

    step = 0
    stacks = False

    def __init__(self) -> None:
        self.events: list[Event] = []

    def now(self) -> int:
        return time.monotonic_ns()

    def at(self, monotonic_ns: int) -> int:
        return monotonic_ns

    def emit(self, event: Event) -> None:
        self.events.append(event)

    def layers(self) -> Iterator[tuple[float, float, float]]:
        """Of each layer the seconds of its forward, its backward and its recompute, waits left out."""
        stalls = [event for event in self.events if isinstance(event, Stall)]
        sums: dict[str, list[float]] = {}
        for span in self.events:
            if not isinstance(span, Span) or span.module is None:
                continue
            waited = sum(max(0, min(one.t + one.d, span.t + span.d) - max(one.t, span.t)) for one in stalls)
            seconds = (span.d - waited) / 1e9
            own = sums.setdefault(span.module, [0.0, 0.0, 0.0])
            if span.lane is Lane.RECOMPUTE:  # within the backward's span
                own[1], own[2] = own[1] - seconds, own[2] + seconds
            else:
                own[span.phase != "forward"] += seconds
        return ((forward, backward, again) for forward, backward, again in sums.values())


def _applied(bench: Bench, plan: ActivationPlan) -> Manager:
    manager, engine, tapes = bench.manager()
    memory = DeviceBudget(total_bytes=bench.case.device_bytes, peak_bytes=lambda: 0, restart=lambda: None)
    Actuator(engine, tapes, manager.layers, memory, tracer=None, link=bench.link).apply(plan)
    return manager
