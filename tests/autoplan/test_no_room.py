"""A run that plans itself never fails for room: what finds none stays or is recomputed, and the next plan needs less."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from small_models import assert_equal, ids, stack, train
from throttled_backend import PacedBackend

import memo
from memo.autoplan import Actuator, AutoPlan, DeviceBudget
from memo.errors import HostBudgetExceeded
from memo.manager import Manager
from memo.manager.plan_source import checked_plan
from memo.mip.activation import ActivationPlan
from memo.swap import Engine, Level, RecomputePolicy, WhenFull, find_layers
from memo.swap.tiers import HostTier

LAYERS = 8
LAYER = 16 * 2 * 48 * 32 * 4
MOST_STEPS = 24


class Run:
    """A run that plans itself over a fast link, and the same without memo."""

    def __init__(self, *, device: float, host: float) -> None:
        self.model, self._reference = stack(layers=LAYERS), stack(layers=LAYERS)
        backend = PacedBackend(d2h_bytes_per_s=2e9, h2d_bytes_per_s=2e9)
        self.host = HostTier(backend, int(host * LAYER), segment_bytes=1 << 20)
        self.engine = Engine(backend, [self.host], min_bytes=512, when_full=WhenFull.STAY)
        tapes = RecomputePolicy(self.engine, Level.SAVE_ALL)
        self.manager = Manager(self.model, find_layers(self.model), self.engine, recompute_policy=tapes)
        memory = DeviceBudget(total_bytes=int(device * LAYER), peak_bytes=lambda: 0, restart=lambda: None)
        actuator = Actuator(self.engine, tapes, self.manager.layers, memory, tracer=None)
        self.planning = AutoPlan(actuator, checked_plan)
        self.manager.plan_with(self.planning)

    def step(self) -> None:
        """One step, equal bit for bit."""
        got = train(self.model, lambda step: self.model(ids(step)), self.manager, steps=1)
        assert_equal(got, train(self._reference, lambda step: self._reference(ids(step)), steps=1))

    def planned(self) -> ActivationPlan:
        """Steps until a plan is in use that moves something, and one step by it."""
        for _ in range(MOST_STEPS):
            self.step()
            plan = self.planning.plan
            if plan is not None and any(part.host for part in plan.layers):
                return plan
        raise AssertionError(self.planning.outcome().lines())


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize(("device", "host"), [(3.0, 1.3), (3.0, 2.1), (2.6, 4.0), (4.0, 0.5)])
def test_gradients_are_equal_where_the_host_is_what_binds(device: float, host: float) -> None:
    run = Run(device=device, host=host)
    for _ in range(9):
        run.step()
    assert run.host.peak <= int(host * LAYER)
    run.manager.close()
    gc.collect()
    assert run.engine.stats.device_bytes == run.host.used == 0


@pytest.mark.filterwarnings("ignore:the plan for", "ignore:a step of", "ignore:the plan stays")
@pytest.mark.parametrize("device", [2.8, 3.4])
def test_a_host_that_is_fuller_than_the_plan_assumed_costs_no_error_and_the_next_plan_needs_less(device: float) -> None:
    run = Run(device=device, host=2.2)
    plan = run.planned()
    assert run.manager.report().stayed is run.manager.report().recomputed_for_room is None
    other = run.host.reserve(run.host.free - (2 << 12))  # another job's
    assert other is not None, "nothing is held between steps"
    run.step()
    report = run.manager.report()
    lacking = sum(one.nbytes for one in (report.stayed, report.recomputed_for_room) if one is not None)
    assert lacking > 0
    assert "for lack of room: " in str(report)
    run.step()
    after = run.planning.plan
    assert after is not None
    assert after.problem.budgets.host_bytes < plan.problem.budgets.host_bytes - lacking
    for _ in range(6):
        run.step()
    assert run.host.peak <= int(2.2 * LAYER)
    other.tier.release(other)
    run.manager.close()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("on_full", ["spill", "raise", "recompute"])
def test_a_run_that_plans_itself_fails_for_no_room_at_all_and_a_fixed_alpha_does(on_full: Any) -> None:
    def offloaded(**options: Any) -> tuple[memo.Manager, torch.nn.Module]:
        model = stack(layers=6)
        return memo.offload(model, host="8KiB", disk=[], min_bytes=512, on_full=on_full, **options), model

    manager, model = offloaded(device="1MiB")
    reference = stack(layers=6)
    got = train(model, lambda step: model(ids(step)), manager, steps=6)
    assert_equal(got, train(reference, lambda step: reference(ids(step)), steps=6))
    report = manager.report()
    assert report.stayed is not None
    assert report.stayed.worst.layer.full == "host"
    assert "stayed on the device for lack of room: " in str(report)
    manager.close()
    manager, model = offloaded(alpha=1.0)
    with pytest.raises(HostBudgetExceeded, match="no room"), manager:
        model(ids())
    gc.collect()
    manager.close()
