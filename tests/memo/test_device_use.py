"""What stands beside saved tensors is found between the edges of layers, whichever of the two peaks came when."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
import torch
from live_bytes import CountedDevice

from memo.autoplan import AutoPlan
from memo.carrier import Carrier
from memo.device_memory import DeviceMemory
from memo.device_use import DeviceUse, Place
from memo.gpt.config import preset
from memo.gpt.model import GPT
from memo.manager import Manager
from memo.planning import checked_plan
from memo.swap.engine import Engine
from memo.swap.layers import find_layers
from memo.swap.levels import TokenLevels
from memo.swap.paced import PacedBackend
from memo.swap.stats import Stats
from memo.swap.tiers import HostTier
from memo.swap.tokenwise import TokenWise

TOKENS = 512


class Told:
    """A device that is told what it holds, and its ledger of saved tensors."""

    def __init__(self) -> None:
        self.peak = 0
        self.stats = Stats()
        self.use = DeviceUse(
            DeviceMemory(total_bytes=1000, peak_bytes=lambda: self.peak, restart=self._restart), self.stats
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
    told.use.edge("first")
    told.holds(saved=500, others=40)
    told.use.edge(None)
    told.holds(saved=100, others=300)  # logits: the two peaks of the whole step come apart
    told.use.edge("first")
    told.holds(saved=490, others=60)
    assert told.use.peak_bytes == 550
    step = told.use.end_step()
    assert step.saved_bytes == 500
    assert step.others == {Place.AROUND: 300, "first": 60}


def test_a_step_of_which_nobody_tells_the_edges_has_the_difference_of_its_peaks() -> None:
    told = Told()
    told.holds(saved=500, others=40)
    told.holds(saved=100, others=300)
    assert told.use.end_step().others == {Place.AROUND: 40}


def test_nothing_has_to_be_left_free_for_what_comes_after_backward() -> None:
    told = Told()
    told.use.has_edges = True
    told.use.edge("first")
    told.holds(saved=100, others=20)
    told.use.end_backward()
    told.holds(saved=0, others=700)  # the optimizer
    assert told.use.peak_bytes == 700
    assert told.use.end_step().others == {Place.AROUND: 0, "first": 20}


def test_a_program_that_restarts_the_peak_after_backward_hides_nothing() -> None:
    told = Told()
    told.holds(saved=100, others=20)
    told.use.end_backward()
    told.peak = 0
    assert told.use.peak_bytes == 120
    assert told.use.end_step().others == {Place.AROUND: 20}


class CountedBackend(PacedBackend):
    """Device memory is torch's own, which the device counts."""

    def empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    phase: str
    peak: int


def run(*, share: float, steps: int = 12) -> tuple[list[Step], AutoPlan, int, Manager]:
    """A run that plans itself, in `share` of what its step takes beyond the weights."""
    torch.manual_seed(0)
    model = GPT(preset("tiny", variant="gpt", layers=6, hidden=64, vocab_size=96, max_seq=TOKENS)).train()
    device = CountedDevice(model)
    weights = device.live

    def step(number: int, manager: Manager | None) -> int:
        model.zero_grad(set_to_none=True)
        device.top = device.live
        ids = torch.randint(96, (1, TOKENS + 1), generator=torch.Generator().manual_seed(number))
        with device:
            if manager is None:
                loss = model(ids[:, :-1], ids[:, 1:])
            else:
                with manager:
                    loss = model(ids[:, :-1], ids[:, 1:])
            loss.backward()
        return device.top

    budget = weights + int(share * (step(0, None) - weights))
    model.zero_grad(set_to_none=True)
    backend = CountedBackend(d2h_bytes_per_s=1e9, h2d_bytes_per_s=1e9)
    engine = Engine(backend, [HostTier(backend, 1 << 28, segment_bytes=1 << 20)], min_bytes=1024)
    tokenwise = TokenWise(engine, TokenLevels(all=1.0))
    manager = Manager(model, find_layers(model), engine, tokenwise=tokenwise)
    memory = DeviceMemory(
        total_bytes=budget, peak_bytes=lambda: device.peak, restart=device.restart, now_bytes=lambda: device.live
    )
    planning = AutoPlan(Carrier(engine, tokenwise, manager.layers, memory, tracer=None), checked_plan)
    manager.plan_with(planning)
    found = []
    for number in range(steps):
        peak = step(number, manager)
        found.append(Step(phase=planning.use().phase, peak=peak))
    return found, planning, budget, manager


@pytest.mark.parametrize("share", [0.6, 0.75, 0.9])
def test_all_of_a_planned_step_is_within_the_budget_and_nearly_fills_it(share: float) -> None:
    """Every byte that operations make counts, gradients and what layers compute with among them."""
    found, planning, budget, manager = run(share=share)
    assert [phase for phase, _ in itertools.groupby(step.phase for step in found)][-1] == "settled"
    plan = planning.plan
    assert plan is not None, planning.use().why_not
    assert plan.declined is None, "else nothing was tested"
    planned = [step.peak / budget for step in found if step.phase in ("planned", "comparing", "settled")]
    assert max(planned) <= 1
    assert planned[-1] > 0.9, "room for gradients is not kept free before there are any"
    manager.close()
