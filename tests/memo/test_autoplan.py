"""When a plan is made, tried, corrected and kept, on a machine that is told how long its layers take."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import random
import threading
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from memo.autoplan import MAX_CORRECTIONS, AutoPlan
from memo.managed import MEASURING, SAFEST, Limits, Setting
from memo.mip.activation import ActivationPlan, Pipeline
from memo.mip.activation_solve import solve_problem
from memo.swap.levels import LayerCosts, Level
from memo.trace.events import Lane, Span, StateChange, TensorState, Tracer

LAYERS = [f"layers.{n}" for n in range(6)]
TOKENS = 64
FORWARD_NS, BACKWARD_NS = 1_000_000_000, 2_000_000_000  # told, not taken; long beside a pause of this machine
ALWAYS, PER_TOKEN = 1 << 20, float(1 << 16)

MIXED = Setting(matmuls=0.5, rest_stays=True)


class Machine:
    """Satisfies `Managed`: remembers what came into force, and tells a step as its layers would."""

    mlp_tiles = 2
    n_layers = len(LAYERS)

    def __init__(self, *, device_bytes: int, host_bytes: int = 1 << 40) -> None:
        self.used: list[ActivationPlan | Setting] = []
        self.heard_by: Tracer | None = None
        self.idle = True
        self.device_bytes, self.host_bytes = device_bytes, host_bytes
        self.others_bytes = 0
        self.tokens = TOKENS
        self.slowness = 1.0
        self.peak = 0
        self.whole: set[str] = set()  # layers that cannot repeat a part of their tokens
        self.mute = False
        self.spare = 0.5
        self.growths: list[float] = []  # that each of `used` was for
        self.transient_bytes = 0  # of the last step
        self.trials = 0  # in each step

    def listen(self, tracer: Tracer | None) -> None:
        self.heard_by = tracer

    def finish(self) -> None: ...

    def use(self, setting: ActivationPlan | Setting, *, growth: float = 1.0) -> None:
        self.used.append(setting)
        self.growths.append(growth)

    def costs(self) -> Mapping[str, LayerCosts]:
        return {name: self._costs(name) for name in LAYERS if name not in self.whole}

    def _costs(self, name: str) -> LayerCosts:
        return LayerCosts(
            layer=name,
            tokens=self.tokens,
            input_bytes=1 << 19,
            always_bytes=ALWAYS * self.tokens // TOKENS,
            bytes_per_token={Level.ALL: PER_TOKEN, Level.MATMULS: PER_TOKEN / 2, Level.ATTENTION: 0.0},
            recompute_s_per_token={Level.ALL: 0.0, Level.MATMULS: 1e-4, Level.ATTENTION: 1e-2},
        )

    def spare_share(self, peak_bytes: int, calls: int) -> float:
        return self.spare

    def limits(self, growth: float = 1.0) -> Limits:
        transient = round(self.transient_bytes * max(1.0, growth))
        return Limits(
            device_bytes=max(0, self.device_bytes - transient),
            others_bytes=self.others_bytes + transient,
            host_bytes=self.host_bytes,
            disk_bytes=0,
        )

    def excess_bytes(self) -> int:
        return max(0, self.peak + self.transient_bytes - self.device_bytes)

    def take_trials(self) -> int:
        return self.trials

    def link(self) -> tuple[float, float, float] | None:
        return (1e7, 1e7, 2e7)

    def take_peak(self) -> int:
        return self.peak

    def restart_peaks(self) -> None:
        pass

    @property
    def full_bytes(self) -> int:
        return round(ALWAYS + PER_TOKEN * TOKENS)

    def tell(self) -> None:
        """What the step now under way did, to whoever listens."""
        if self.heard_by is None or self.mute:
            return
        plan = self.used[-1] if isinstance(self.used[-1], ActivationPlan) else None
        recompute = 0 if plan is None else plan.stages[0].recompute_s * 1e9 / len(LAYERS)
        t = self.heard_by.now()
        scale = self.slowness * self.tokens / TOKENS
        forward, backward = round(FORWARD_NS * scale), round(BACKWARD_NS * scale)
        for name in LAYERS:
            self.heard_by.emit(StateChange(t=t, step=0, id=1, to=TensorState.LIVE, nbytes=self.full_bytes, module=name))
            self._span(t, forward, name, "forward", Lane.COMPUTE)
            t += forward
        for name in reversed(LAYERS):
            self._span(t, backward + round(recompute), name, "backward", Lane.COMPUTE)
            self._span(t, round(recompute), name, "backward", Lane.RECOMPUTE)
            t += backward + round(recompute)

    def _span(self, t: int, d: int, module: str, phase: str, lane: Lane) -> None:
        assert self.heard_by is not None
        self.heard_by.emit(Span(t=t, d=d, step=0, lane=lane, module=module, phase=phase))


def make(machine: Machine) -> AutoPlan:
    return AutoPlan(machine, solve_problem)


def step(auto: AutoPlan, machine: Machine, *, tokens: int = TOKENS, batch: int = 2) -> None:
    machine.tokens = tokens
    auto.before_forward()
    auto.before_layer((torch.zeros(batch, tokens, 8),), {})
    if isinstance(machine.used[-1], ActivationPlan):
        machine.peak = machine.used[-1].stages[0].peak_device_bytes
    machine.tell()


def tight(machine_layers: float = 3.5) -> Machine:
    return Machine(device_bytes=round(machine_layers * (ALWAYS + PER_TOKEN * TOKENS)))


def test_the_plan_comes_after_a_measured_step_at_safe_settings_and_then_stays() -> None:
    machine = tight()
    auto = make(machine)
    for _ in range(8):
        step(auto, machine)
    assert machine.used[:2] == [MEASURING, MIXED]
    assert isinstance(machine.used[2], ActivationPlan)
    assert len(machine.used) == 3, "a prediction that holds needs no other plan"
    assert machine.used[2].declined is None
    assert machine.used[2].problem.profile.mlp_tiles == machine.mlp_tiles, "or the model could not be given it again"
    assert auto.use().phase == "settled"
    assert auto.use().measured_s == pytest.approx(machine.used[2].stages[0].microbatch_s, rel=0.05)
    assert machine.heard_by is None, "a settled run is listened to no longer"


def test_ranks_measure_with_as_many_tokens_mixed_as_each_of_them_has_room_for() -> None:
    roomy, narrow = tight(5), tight(3.5)
    narrow.spare = 0.125
    run_together([roomy, narrow], 2)
    assert roomy.used[1] == narrow.used[1] == Setting(matmuls=0.125, rest_stays=True)


def test_nothing_is_done_where_everything_fits() -> None:
    machine = Machine(device_bytes=1 << 40)
    auto = make(machine)
    for _ in range(4):
        step(auto, machine)
    plan = auto.plan
    assert plan is not None
    assert plan.declined is not None
    assert plan.declined.startswith("fits in ")
    assert str(auto.use().lines()[0]).startswith("plan: declined: fits in ")


def test_another_length_is_planned_at_once_and_remembered() -> None:
    machine = tight(9)
    auto = make(machine)
    for _ in range(6):
        step(auto, machine)
    first = auto.plan
    step(auto, machine, tokens=2 * TOKENS)
    second = auto.plan
    assert second is not None
    assert second.problem.profile.signature.tokens == 2 * TOKENS
    assert machine.used[-1] is second
    step(auto, machine)
    assert auto.plan is first
    assert machine.used[-1] is first
    assert auto.use().plans == 2


def test_lengths_that_never_come_again_are_measured_as_one_and_share_plans() -> None:
    machine = tight(30)
    auto = make(machine)
    drawn = random.Random(3)
    lengths = drawn.sample(range(TOKENS, 3 * TOKENS), 2 * TOKENS)
    for number, length in enumerate(lengths):
        step(auto, machine, tokens=length)
        if number < 3:
            assert auto.plan is None
            assert machine.used[-1] == (MEASURING if number == 0 else MIXED)
        else:
            assert auto.plan is not None
            made_for = auto.plan.problem.profile.signature.tokens
            assert length <= made_for <= 1.25 * length, "never for fewer tokens, nor for many more"
    assert auto.use().plans <= 14, "at most eight an octave, and the first"


def test_the_plan_of_a_longer_step_leaves_room_for_what_else_grows() -> None:
    machine = tight(9)
    auto = make(machine)
    for _ in range(6):
        machine.transient_bytes = machine.device_bytes // 10
        step(auto, machine)
    step(auto, machine, tokens=2 * TOKENS)
    plan = auto.plan
    assert plan is not None
    assert plan.problem.budgets.device_bytes == machine.device_bytes - 2 * machine.transient_bytes
    assert machine.growths[-1] == 2.0


def test_a_longer_step_before_there_is_a_plan_is_bounded_anew() -> None:
    machine = tight()
    auto = make(machine)
    step(auto, machine)
    step(auto, machine, tokens=2 * TOKENS)
    step(auto, machine, tokens=4 * TOKENS)
    assert machine.used == [MEASURING, MIXED, MIXED, MIXED]
    assert machine.growths == [1.0, 1.0, 2.0, 2.0]


def test_a_step_above_the_budget_is_told_and_planned_anew_though_all_was_settled() -> None:
    machine = tight(4.5)
    auto = make(machine)
    for _ in range(6):
        step(auto, machine)
    first = auto.plan
    assert first is not None
    assert auto.use().phase == "settled"
    step(auto, machine, tokens=60)
    assert auto.plan is first
    machine.transient_bytes = taken = machine.device_bytes // 4
    with pytest.warns(RuntimeWarning, match=r"a step of 2 x 60 tokens took .* of device memory more than its budget"):
        step(auto, machine)
    second = auto.plan
    assert second is not None
    assert second.stages[0].peak_device_bytes <= machine.device_bytes - taken
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        for _ in range(4):
            step(auto, machine)
    assert auto.use().phase == "settled"


def test_the_time_of_a_step_with_a_trial_is_compared_with_nothing() -> None:
    machine = tight()
    auto = make(machine)
    for _ in range(4):
        step(auto, machine)
    machine.slowness, machine.trials = 1.5, 1
    before = auto.plan
    for _ in range(4):
        step(auto, machine)
    assert auto.plan is before
    assert auto.use().phase == "settled"


def test_evaluation_is_no_step() -> None:
    machine = tight()
    auto = make(machine)
    step(auto, machine)
    for _ in range(5):
        auto.before_forward()
        with torch.no_grad():
            auto.before_layer((torch.zeros(2, TOKENS, 8),), {})
    assert machine.used == [MEASURING, MIXED], "one training step was concluded, once"


def test_nothing_changes_while_anything_is_saved() -> None:
    machine = tight()
    auto = make(machine)
    step(auto, machine)
    machine.idle = False
    for _ in range(5):
        auto.before_forward()
        auto.before_layer((torch.zeros(2, 4 * TOKENS, 8),), {})
    assert machine.used == [MEASURING]
    machine.idle = True
    auto.before_forward()
    assert machine.used == [MEASURING, MIXED]


def test_a_step_that_takes_longer_than_predicted_is_planned_anew() -> None:
    machine = tight()
    auto = make(machine)
    for _ in range(4):
        step(auto, machine)
    before = auto.plan
    machine.slowness = 1.5
    for _ in range(4):
        step(auto, machine)
    after = auto.plan
    assert before is not None
    assert after is not None
    assert after.stages[0].compute_s == pytest.approx(1.5 * before.stages[0].compute_s, rel=1e-3)
    assert auto.use().phase == "settled"


def test_a_prediction_that_never_holds_is_said_once_and_the_plan_stays() -> None:
    machine = tight()
    auto = make(machine)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for number in range(3 + 2 * (MAX_CORRECTIONS + 3)):
            machine.slowness = 1.3 ** (number + 1)
            step(auto, machine)
    said = [str(one.message) for one in told if one.category is RuntimeWarning]
    assert len(said) == 1, "one warning, however often"
    assert said[0].startswith(f"the plan for 2 x {TOKENS} tokens predicts")
    assert auto.use().phase == "settled"


def test_a_peak_above_the_budget_makes_the_next_plan_keep_less() -> None:
    machine = tight(4.5)
    auto = make(machine)
    for _ in range(4):
        step(auto, machine)
    first = auto.plan
    assert first is not None
    step(auto, machine)
    machine.peak = first.stages[0].peak_device_bytes + (excess := 100_000)  # fractions were kept as whole storages
    for _ in range(4):
        auto.before_forward()
        auto.before_layer((torch.zeros(2, TOKENS, 8),), {})
        machine.tell()
        machine.peak = min(machine.peak, first.stages[0].peak_device_bytes)
    second = auto.plan
    assert second is not None
    assert second.stages[0].peak_device_bytes <= first.stages[0].peak_device_bytes - excess


def test_a_plan_that_does_nothing_is_looked_at_once_too() -> None:
    machine = tight(20)
    auto = make(machine)
    for _ in range(4):
        step(auto, machine)
    assert auto.plan is not None
    assert auto.plan.declined is not None
    machine.transient_bytes = machine.device_bytes * 3 // 4  # which the steps that were measured did not need
    with pytest.warns(RuntimeWarning, match="more than its budget"):
        step(auto, machine)
    assert auto.plan is not None
    assert auto.plan.declined is None
    assert auto.plan.stages[0].peak_device_bytes <= machine.device_bytes // 4


def test_plans_that_never_hold_the_budget_give_way_to_the_safest_setting() -> None:
    machine = tight(4.5)
    auto = make(machine)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(3 + 2 * (MAX_CORRECTIONS + 3)):
            step(auto, machine)
            if isinstance(machine.used[-1], ActivationPlan):
                machine.peak = machine.device_bytes + 1
    assert machine.used[-1] is SAFEST
    assert auto.plan is None
    assert "took more device memory than the budget" in auto.use().lines()[0]
    assert sum("no plan" in str(one.message) for one in told) == 1


def test_microbatches_in_flight_each_keep_what_the_budget_has_room_for() -> None:
    """Two forwards before the first backward: both microbatches' kept bytes are in the predicted peak."""
    machine = tight(9)
    auto = make(machine)
    for number in range(4):
        step(auto, machine)
        if number == 2:
            machine.tell()
    plan = auto.plan
    assert plan is not None
    assert (plan.problem.pipeline.microbatches, plan.problem.pipeline.in_flight(0)) == (2, 2)
    assert plan.problem.budgets.device_bytes == machine.device_bytes
    one = dataclasses.replace(plan.problem, pipeline=Pipeline())
    kept = sum(solve_problem(one).layers[n].kept for n in range(len(LAYERS)))
    assert sum(layer.kept * sum(layer.token_fractions[:2]) for layer in plan.layers) < kept


def test_the_schedule_says_how_many_microbatches_are_in_flight() -> None:
    machine = tight(9)
    auto = AutoPlan(machine, solve_problem, held=2)
    for number in range(4):
        step(auto, machine)
        if number == 2:
            for _ in range(4):
                machine.tell()
    plan = auto.plan
    assert plan is not None
    assert (plan.problem.pipeline.microbatches, plan.problem.pipeline.held) == (5, 2)


class Together:
    """Ranks of one group as threads: each says what it has, and hears all."""

    def __init__(self, ranks: int) -> None:
        self._meeting = threading.Barrier(ranks, timeout=30)
        self._said: list[Any] = [None] * ranks

    def everyones(self, rank: int) -> Any:
        def said(value: Any) -> list[Any]:
            self._said[rank] = value
            self._meeting.wait()
            heard = list(self._said)
            self._meeting.wait()
            return heard

        return said


def run_together(machines: Sequence[Machine], steps: int) -> list[AutoPlan]:
    group = Together(len(machines))
    autos = [AutoPlan(machine, solve_problem, everyones=group.everyones(n)) for n, machine in enumerate(machines)]

    def run(rank: int) -> None:
        for _ in range(steps):
            step(autos[rank], machines[rank])

    with concurrent.futures.ThreadPoolExecutor(len(machines)) as pool:
        list(pool.map(run, range(len(machines))))
    return autos


def test_ranks_of_a_group_carry_out_one_plan_made_for_the_worst_of_them() -> None:
    roomy, narrow = tight(5), tight(3.5)
    narrow.slowness = 1.5
    autos = run_together([roomy, narrow], 8)
    first, second = (auto.plan for auto in autos)
    assert first == second
    assert first is not None
    assert first.problem.budgets.device_bytes == narrow.device_bytes
    assert first.problem.profile.classes[0].forward_s == pytest.approx(1.5 * FORWARD_NS / 1e9)
    assert [type(one) for one in roomy.used] == [type(one) for one in narrow.used]
    assert autos[0].use().phase == autos[1].use().phase


def test_ranks_of_a_group_with_other_lengths_share_a_plan_for_the_longest() -> None:
    """Each has another length, of which only one is new at a time: nobody waits for anybody."""
    machines = [tight(12), tight(12)]
    group = Together(2)
    autos = [AutoPlan(machine, solve_problem, everyones=group.everyones(n)) for n, machine in enumerate(machines)]
    lengths = [[64, 64, 64, 64, 64, 100, 64, 64], [50, 64, 50, 64, 90, 64, 64, 128]]

    def run(rank: int) -> list[ActivationPlan | None]:
        plans = []
        for length in lengths[rank]:
            step(autos[rank], machines[rank], tokens=length)
            plans.append(autos[rank].plan)
        return plans

    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        first, second = pool.map(run, range(2))
    assert first == second
    made_for = [None if plan is None else plan.problem.profile.signature.tokens for plan in first]
    assert made_for == [None, None, None, 64, 96, 104, 64, 128]


def test_what_one_rank_cannot_do_is_planned_for_none() -> None:
    """One rank's second half of the layers is not proven token-wise: no rank recomputes there."""
    able, unable = tight(4.5), tight(4.5)
    unable.whole = set(LAYERS[3:])
    autos = run_together([able, unable], 4)
    plan = autos[0].plan
    assert plan == autos[1].plan
    assert plan is not None
    assert [len(layer.levels) for layer in plan.problem.profile.layer_profiles()] == [3, 3, 3, 1, 1, 1]
    assert [layer.all_tokens for layer in plan.layers[3:]] == [1.0] * 3


def test_a_rank_that_measured_nothing_leaves_all_at_the_safest_setting() -> None:
    well, deaf = tight(), tight()
    deaf.mute = True
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        autos = run_together([well, deaf], 6)
    assert [auto.plan for auto in autos] == [None, None]
    assert well.used[-1] is deaf.used[-1] is SAFEST
    assert any("no layer ran forward and backward" in str(one.message) for one in told)


def test_a_budget_that_nothing_fits_leaves_the_safest_setting_and_says_why() -> None:
    machine = Machine(device_bytes=1 << 10)
    machine.others_bytes = 3 << 20  # a user's budget is for all of it
    auto = make(machine)
    for _ in range(3):
        step(auto, machine)
    with pytest.warns(RuntimeWarning, match="no plan: .*, beside 3 MiB for everything but saved tensors; every layer"):
        step(auto, machine)
    step(auto, machine)
    assert machine.used[-1] is SAFEST
    assert auto.plan is None
    assert auto.use().why_not is not None
    assert auto.use().lines()[0].startswith("plan: none: ")


def test_replanning_is_quick(record_property: Any) -> None:
    machine = tight(20)
    auto = make(machine)
    for _ in range(4):
        step(auto, machine)
    before = auto.use().planning_s
    for length in (72, 80, 88, 96):
        step(auto, machine, tokens=length)
    record_property("replan_ms", (auto.use().planning_s - before) / 4 * 1e3)
    assert auto.use().plans == 5
