"""Memory beside saved tensors is found between the edges of layers, whichever of the two peaks came first."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools

import pytest
import torch
from live_bytes import CountedDevice
from throttled_backend import PacedBackend

from memo.autoplan import Actuator, AutoPlan, DeviceBudget
from memo.autoplan.device_peaks import DevicePeaks, MeasuredRecompute, Outside
from memo.gpt import preset
from memo.gpt.model import GPT
from memo.manager import Manager
from memo.manager.plan_source import checked_plan
from memo.swap import Engine, Level, RecomputePolicy, Stats, WhenFull, find_layers
from memo.swap.tiers import HostTier

TOKENS = 512


class Told:
    """A device that is told what it holds, and its ledger of saved tensors."""

    def __init__(self) -> None:
        self.peak = 0
        self.stats = Stats()
        self.use = DevicePeaks(
            DeviceBudget(total_bytes=1000, peak_bytes=lambda: self.peak, restart=self._restart), self.stats
        )

    def _restart(self) -> None:
        self.peak = 0

    def holds(self, *, saved: int, others: int) -> None:
        self.stats.came_to_device(saved)
        self.peak = max(self.peak, saved + others)
        self.stats.device_bytes -= saved


def test_each_layer_and_what_is_around_them_is_looked_at_apart() -> None:
    told = Told()
    told.holds(saved=0, others=70)
    told.use.cross_boundary("first")
    told.holds(saved=500, others=40)
    told.use.cross_boundary(None)
    told.holds(saved=100, others=300)  # logits: the two peaks of the whole step come apart
    told.use.cross_boundary("first")
    told.holds(saved=490, others=60)
    assert told.use.peak_bytes == 550
    step = told.use.end_step()
    assert step.saved_bytes == 500
    assert step.others == {Outside.LAYERS: 300, "first": 60}


def test_a_step_of_which_nobody_tells_the_edges_has_the_difference_of_its_peaks() -> None:
    told = Told()
    told.holds(saved=500, others=40)
    told.holds(saved=100, others=300)
    assert told.use.end_step().others == {Outside.LAYERS: 40}


def test_a_recompute_is_a_part_of_its_own_within_its_layers_backward() -> None:
    told = Told()
    told.use.cross_boundary("first")
    told.holds(saved=500, others=40)
    told.use.cross_boundary(None)
    told.holds(saved=100, others=10)
    told.use.cross_boundary("first")
    told.holds(saved=200, others=20)
    told.use.cross_recompute("first", begins=True)
    told.holds(saved=250, others=90)
    told.use.cross_recompute("first", begins=False)
    told.holds(saved=400, others=50)
    step = told.use.end_step()
    assert step.saved_bytes == 500
    assert step.others == {Outside.LAYERS: 10, "first": 50, MeasuredRecompute("first"): 90}


def test_of_a_recompute_in_parts_what_is_absent_at_each_peak_counts() -> None:
    told = Told()
    told.use.cross_boundary("first")
    told.holds(saved=500, others=40)  # its forward
    told.use.cross_boundary(None)
    told.use.cross_boundary("first")
    told.holds(saved=100, others=45)  # before anything of it is there again
    told.use.cross_recompute("first", begins=True, absent_nbytes=300)
    told.holds(saved=200, others=90)
    told.use.cross_recompute("first", begins=False, absent_nbytes=300)
    told.holds(saved=200, others=50)
    told.use.cross_recompute("first", begins=True, absent_nbytes=200)
    told.holds(saved=300, others=80)
    told.use.cross_recompute("first", begins=False, absent_nbytes=200)
    told.holds(saved=300, others=60)
    step = told.use.end_step()
    assert step.others == {Outside.LAYERS: 0, "first": 60, MeasuredRecompute("first"): 90}
    # 500 + 60 are 200 more than the most after a part, 300 + 60, and 500 + 90 are 210 more than within one, 300 + 80.
    assert step.absent == {"first": 200}
    told.use.cross_boundary("first")
    told.use.cross_recompute("first", begins=True)
    told.holds(saved=300, others=10)
    told.use.cross_recompute("first", begins=False)
    told.holds(saved=300, others=20)
    assert told.use.end_step().absent == {}


def test_a_trials_memory_counts_for_the_budget_and_for_no_later_step() -> None:
    told = Told()
    told.use.cross_boundary("first")
    told.holds(saved=500, others=40)
    told.use.cross_recompute(None, begins=True)
    told.holds(saved=500, others=300)
    told.use.cross_recompute(None, begins=False)
    told.holds(saved=500, others=60)  # the rest of the forward that the trial is in
    told.use.cross_boundary(None)
    assert told.use.peak_bytes == told.use.planned_peak_bytes == 800
    step = told.use.end_step()
    assert step.saved_bytes == 500
    assert step.others == {Outside.LAYERS: 0, "first": 60}


def test_nothing_has_to_be_left_free_for_what_comes_after_backward() -> None:
    told = Told()
    told.use.by_layer = True
    told.use.cross_boundary("first")
    told.holds(saved=100, others=20)
    told.use.end_backward()
    told.holds(saved=0, others=700)  # the optimizer
    assert told.use.peak_bytes == 700
    assert told.use.end_step().others == {Outside.LAYERS: 0, "first": 20}


def test_a_program_that_restarts_the_peak_after_backward_hides_nothing() -> None:
    told = Told()
    told.holds(saved=100, others=20)
    told.use.end_backward()
    told.peak = 0
    assert told.use.peak_bytes == 120
    assert told.use.end_step().others == {Outside.LAYERS: 20}


def test_a_plan_decides_on_what_comes_before_the_end_of_backward_alone() -> None:
    for by_layer in (False, True):
        told = Told()
        told.use.by_layer = by_layer
        told.holds(saved=100, others=20)
        told.use.end_backward()
        told.holds(saved=0, others=700)
        assert (told.use.planned_peak_bytes, told.use.peak_bytes) == (120, 700)
        told.use.cross_boundary("first") if by_layer else None  # another microbatch
        told.holds(saved=150, others=20)
        told.use.end_backward()
        assert told.use.peak_bytes == 700
        assert told.use.planned_peak_bytes == (170 if by_layer else 700), "one counter cannot tell them apart"


def test_of_a_settled_step_only_what_is_new_is_seen_and_the_programs_counter_goes_on() -> None:
    told = Told()
    told.holds(saved=100, others=20)
    told.use.forget()
    assert told.peak == 120
    assert told.use.peak_bytes == 0
    told.holds(saved=100, others=10)
    assert told.use.peak_bytes == 0, "lower than the counter, which nobody restarts"
    told.holds(saved=100, others=30)
    assert told.use.peak_bytes == 130
    told.use.forget()
    told.peak = 0  # by the program, which looks at each step alone
    told.holds(saved=100, others=5)
    assert told.use.peak_bytes == 105


class CountedBackend(PacedBackend):
    """Device memory is torch's own, which the device counts."""

    def empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    phase: str
    peak: int


class Run:
    """A small GPT on a counted device, for `batch` sequences of TOKENS in all."""

    def __init__(self, batch: int) -> None:
        torch.manual_seed(0)
        self._shape = batch, TOKENS // batch
        self.model = GPT(preset("tiny", variant="gpt", layers=6, hidden=64, vocab_size=96, max_seq=TOKENS)).train()
        self.device = CountedDevice(self.model)
        self.weights = self.device.live
        self.plain = self.step(0, None)

    def step(self, number: int, manager: Manager | None) -> int:
        """The most that the device holds in it."""
        self.model.zero_grad(set_to_none=True)
        self.device.top = self.device.live
        batch, tokens = self._shape
        ids = torch.randint(96, (batch, tokens + 1), generator=torch.Generator().manual_seed(number))
        with self.device:
            with contextlib.nullcontext() if manager is None else manager:
                loss = self.model(ids[:, :-1], ids[:, 1:])
            loss.backward()
        return self.device.top

    def memory(self, budget: int) -> DeviceBudget:
        device = self.device
        return DeviceBudget(
            total_bytes=budget, peak_bytes=lambda: device.peak, restart=device.restart, used_bytes=lambda: device.live
        )

    def manager(self, host: int, levels: Level) -> tuple[Manager, Engine, RecomputePolicy]:
        backend = CountedBackend(d2h_bytes_per_s=1e9, h2d_bytes_per_s=1e9)
        tiers = [HostTier(backend, host, segment_bytes=1 << 20)]
        engine = Engine(backend, tiers, min_bytes=1024, when_full=WhenFull.STAY)
        recompute_policy = RecomputePolicy(engine, levels)
        return (
            Manager(self.model, find_layers(self.model), engine, recompute_policy=recompute_policy),
            engine,
            recompute_policy,
        )


@pytest.mark.parametrize(("batch", "host"), [(1, 1.0), (1, 0.15), (2, 0.15), (4, 0.15)])
@pytest.mark.parametrize("share", [0.6, 0.9])
def test_all_of_a_planned_step_is_within_the_budget(share: float, batch: int, host: float) -> None:
    """Every byte that operations make counts, gradients and what layers compute with among them."""
    run = Run(batch)
    saved = run.plain - run.weights
    budget = run.weights + int(share * saved)
    manager, engine, recompute_policy = run.manager(int(host * saved), Level.SAVE_ALL)
    planning = AutoPlan(
        Actuator(engine, recompute_policy, manager.layers, run.memory(budget), tracer=None), checked_plan
    )
    manager.plan_with(planning)
    run.model.zero_grad(set_to_none=True)
    found: list[Step] = []
    while len(found) < 12 or (found[-1].phase != "settled" and len(found) < 24):
        peak = run.step(len(found), manager)
        found.append(Step(phase=planning.outcome().phase, peak=peak))
    assert found[-1].phase == "settled"
    plan = planning.plan
    assert plan is not None, planning.outcome().why_not
    assert plan.declined is None, "else nothing was tested"
    planned = [step.peak / budget for step in found if step.phase in ("planned", "comparing", "settled")]
    assert max(planned) <= 1
    if host == 1:  # what is computed again a plan counts whole all the time: there it fills less
        assert planned[-1] > 0.85, "room for gradients is not kept free before there are any"
    manager.close()


def test_recomputes_of_a_step_are_measured_apart() -> None:
    """What a recompute makes is not counted in its layer's backward, and trials of the first step nowhere."""
    run = Run(1)
    manager, engine, recompute_policy = run.manager(1 << 28, Level.SAVE_ATTENTION)
    recompute_policy.tries_again = False
    use = DevicePeaks(run.memory(1 << 40), engine.stats)
    engine.at_layer_boundaries(use.cross_boundary, use.cross_recompute)
    found = []
    for number in range(3):
        before = recompute_policy.trials_run
        run.step(number, manager)
        found.append(use.end_step().others)
        assert (recompute_policy.trials_run > before) == (number == 0)
    names = [layer.name for layer in manager.layers]
    first, second, third = found
    assert third == second
    assert second.keys() == {Outside.LAYERS, *names, *map(MeasuredRecompute, names)}
    assert all(first[name] == second[name] for name in names), "a trial is no part of its layer"
    gradients = sum(parameter.nbytes for parameter in manager.layers[0].module.parameters())
    for name, following in itertools.pairwise(names):
        assert second[MeasuredRecompute(name)] - second[MeasuredRecompute(following)] == gradients, (
            "of the layer that is behind it"
        )
        assert second[MeasuredRecompute(name)] < second[name], "its own gradients come after it"
    manager.close()
