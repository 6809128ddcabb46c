"""The planner: as good as brute force, within every budget, the paper's rule as a special case, the same plan again."""

from __future__ import annotations

import dataclasses
import itertools
import subprocess
import sys
import time

import pytest
from activation_problems import layer, machine, plan_activations, profile_of, random_problem

from memo.errors import Infeasible, PlanError
from memo.mip.activation import (
    ActivationPlan,
    ActivationProblem,
    Budgets,
    DoesNotFit,
    LayerPlan,
    Pipeline,
    check_plan,
    plan_to_json,
    predict_stages,
    solve_problem,
)
from memo.mip.activation.files import plan_from_json
from memo.mip.activation.layer_groups import Sharing
from memo.mip.activation.linear_program import PlanModel
from memo.mip.activation.proof import verify_by_simulation
from memo.mip.activation.simulator import simulate
from memo.mip.inputs import ALL, ATTENTION, MATMULS
from memo.units import format_duration


@pytest.mark.parametrize("classes", [1, 3])
@pytest.mark.parametrize(
    "pipeline",
    [
        Pipeline(),
        Pipeline(stages=3, microbatches=5),
        Pipeline(microbatches=4),
        Pipeline(microbatches=6, held=3),
        Pipeline(microbatches=9, held=9),
    ],
)
def test_every_plan_passes_the_checker_and_is_the_same_again(classes: int, pipeline: Pipeline) -> None:
    solved = 0
    for seed in range(20):
        problem = random_problem(seed, layers=9, classes=classes, pipeline=pipeline)
        try:
            plan = solve_problem(problem)
        except Infeasible:
            continue
        solved += 1
        assert check_plan(plan) is None
        assert plan.declined is None
        assert plan_to_json(solve_problem(problem)) == plan_to_json(plan)
    assert solved > 10


def test_sharing_variables_among_the_inner_layers_of_a_class_loses_nothing() -> None:
    """Or next to nothing, where early layers have room for more of what recomputes are given."""
    losses: dict[bool, list[float]] = {False: [], True: []}
    for seed, layers in itertools.product(range(20), (9, 16)):
        problem = random_problem(seed, layers=layers)
        shared, alone = PlanModel(problem, sharing=Sharing.INTERIOR), PlanModel(problem, sharing=Sharing.NONE)
        found = shared.solve()
        assert found == alone.solve()
        given = any(point.beside_bytes for point in problem.profile.classes[0].points)
        losses[given].append(shared.step_s / alone.step_s - 1 if found else 0.0)
    assert min(min(losses[False]), min(losses[True])) > -1e-9
    assert max(losses[False]) < 1e-6
    assert max(losses[True]) < 1e-3


@pytest.mark.parametrize(
    ("host_bytes", "d2h_bytes_per_s"),
    [(10 * 900, 1e6), (10 * 1234, 1e6), (1 << 40, 100.0), (1 << 40, 37.0), (10 * 700, 75.0), (10 * 1590, 160.0)],
)
def test_the_papers_rule_is_the_special_case(host_bytes: int, d2h_bytes_per_s: float) -> None:
    """max alpha s.t. (S_in + S_attn + alpha S_oth) / B <= T_fwd  and  (n - 2) (S_in + S_attn + alpha S_oth) <= M_cpu.

    Of the linear program, where it has only what this rule knows: two levels, host memory, and no room on the device beyond
    a whole layer and what the one before it saves.
    """
    block, n = layer(always=200, all=1400, matmuls=None, attention=1.0), 12
    fixed, other = block.always_bytes, block.points[0].saved_bytes
    alpha = min((block.forward_s * d2h_bytes_per_s - fixed) / other, (host_bytes / (n - 2) - fixed) / other)
    assert 0 < alpha < 1
    problem = ActivationProblem(
        profile=profile_of(*[block] * n),
        hardware=machine(d2h_bytes_per_s=d2h_bytes_per_s, h2d_bytes_per_s=1e9, duplex_bytes_per_s=1e9),
        budgets=Budgets(device_bytes=round(block.full_bytes + fixed + alpha * other), host_bytes=host_bytes),
    )
    model = PlanModel(problem, sharing=Sharing.UNIFORM)
    assert model.solve()
    for fractions in model.fractions()[:-2]:
        assert fractions[ALL] == pytest.approx(alpha, abs=1e-3)


def test_what_fits_is_left_alone_and_says_so() -> None:
    block = layer()
    plan = plan_activations(profile_of(block, block, block), machine(), Budgets(device_bytes=480 + (1 << 20)))
    assert plan.declined == "fits in 480 B of 1 MiB"
    assert set(plan.layers) == {LayerPlan()}
    assert plan.step_s == pytest.approx(90.0)


@pytest.mark.parametrize("tier", ["device", "host", "disk"])
def test_infeasible_names_the_tier_the_bytes_and_a_budget_that_fits(tier: str) -> None:
    block = layer(matmuls=None)
    budgets = Budgets(device_bytes=block.full_bytes + 20 + 5, host_bytes=31, disk_bytes=17)
    profile = profile_of(*[block] * 6)
    with pytest.raises(DoesNotFit) as raised:
        plan_activations(profile, machine(), budgets)
    # Six layers: 5 x 20 bytes must leave, or be kept beside a whole layer; compute waits for what leaves.
    assert "the device lacks 28 B" in str(raised.value) or "the device lacks 27 B" in str(raised.value)
    least = raised.value.least_bytes[tier]
    assert raised.value.memory.nbytes == pytest.approx(raised.value.least_bytes["device"], abs=2)
    enough = dataclasses.replace(budgets, **{f"{tier}_bytes": least})
    assert check_plan(plan_activations(profile, machine(), enough)) is None
    with pytest.raises(Infeasible):
        plan_activations(profile, machine(), dataclasses.replace(budgets, **{f"{tier}_bytes": least - 2}))


def test_compute_waits_for_copies_only_where_two_layers_have_no_room() -> None:
    block = layer(matmuls=None)
    profile = profile_of(*[block] * 6)
    two = Budgets(device_bytes=block.full_bytes + 20, host_bytes=1 << 20)
    one = dataclasses.replace(two, device_bytes=block.full_bytes)
    overlapped, waiting = (plan_activations(profile, machine(), budgets) for budgets in (two, one))
    assert overlapped.problem.overlap
    assert not waiting.problem.overlap
    assert waiting.stages[0].peak_device_bytes == block.full_bytes
    assert overlapped.step_s < waiting.step_s
    assert plan_from_json(plan_to_json(waiting)) == waiting


def test_recompute_that_is_cheaper_than_waiting_is_chosen_and_the_other_way_round() -> None:
    def chosen(recompute_s: float) -> LayerPlan:
        block = layer(always=20, all=400, matmuls=None, attention=recompute_s)
        budgets = Budgets(device_bytes=2 * block.full_bytes + 1, host_bytes=1 << 30)
        return plan_activations(profile_of(*[block] * 8), machine(), budgets).layers[1]  # the first one is kept

    # The forward window of 10 s takes 100 bytes of 420 at 10 bytes/s; the others stall it for 32 s, and backward for 22 s.
    assert chosen(1.0).point == ATTENTION
    assert chosen(1000.0).point == ALL


def test_a_budget_is_never_said_to_save_more_than_recompute_and_waits_take() -> None:
    """What the first byte saves, times a GiB, is years."""
    block = layer(always=20, all=400, matmuls=None, attention=100.0)
    budgets = Budgets(device_bytes=2 * block.full_bytes + 1, host_bytes=1000)
    profile = profile_of(*[block] * 8)
    plan = plan_activations(profile, machine(), budgets)
    roomy = plan_activations(profile, machine(), Budgets(device_bytes=1 << 40))
    added = format_duration(plan.step_s - roomy.step_s)
    assert plan.step_s > 2 * roomy.step_s
    assert plan.binding
    assert all(reason.endswith(f" is full: a GiB more saves up to {added} a step") for reason in plan.binding)


def test_disk_wear_bounds_what_is_written() -> None:
    block = layer(matmuls=None, attention=2.0)
    free = Budgets(device_bytes=2 * block.full_bytes + 1, disk_bytes=1 << 30)
    bounded = dataclasses.replace(free, disk_wear_bytes_per_day=86400.0)  # one byte a second
    rates = ("d2h_bytes_per_s", "h2d_bytes_per_s", "disk_write_bytes_per_s", "disk_read_bytes_per_s")
    fast = machine(**dict.fromkeys(rates, 100.0), duplex_bytes_per_s=200.0)
    profile = profile_of(*[block] * 8)
    assert plan_activations(profile, fast, free).stages[0].disk_written_bytes == pytest.approx(6 * 160, abs=1)
    plan = plan_activations(profile, fast, bounded)
    assert 100 <= plan.stages[0].disk_written_bytes <= plan.step_s


def test_early_stages_hold_more_microbatches_and_get_more_of_the_nodes_host_memory() -> None:
    block = layer(matmuls=None)
    device = 2 * block.full_bytes + 4 * block.full_bytes
    pipeline = Pipeline(stages=4, microbatches=8, stage_ranks=1)
    budgets = Budgets(device_bytes=device, host_bytes=3000, ranks_per_node=4)
    plan = plan_activations(profile_of(*[block] * 16), machine(node_d2h_bytes_per_s=400.0), budgets, pipeline)
    host = [stage.peak_host_bytes for stage in plan.stages]
    assert host == sorted(host, reverse=True)
    assert host[0] > host[-1]
    assert sum(host) <= 3000


@pytest.mark.parametrize(
    ("stages", "each", "node", "found"),
    [
        (3, 4, 8, [{0: 4, 1: 4}, {2: 4}]),
        (4, 3, 8, [{0: 3, 1: 3, 2: 2}, {2: 1, 3: 3}]),
        (2, 12, 8, [{0: 8}, {0: 4, 1: 4}, {1: 8}]),
        (2, 40, 8, [{0: 8}, {1: 8}]),
        (2, 0, 8, [{0: 8}, {1: 8}]),
        (3, 9, 8, [{0: 8}, {0: 1, 1: 7}, {1: 2, 2: 6}, {2: 3}]),
    ],
)
def test_ranks_of_a_stage_fill_nodes_after_those_of_the_stage_before(
    stages: int, each: int, node: int, found: list[dict[int, int]]
) -> None:
    problem = ActivationProblem(
        profile=profile_of(*[layer()] * 4),
        hardware=machine(),
        budgets=Budgets(device_bytes=1 << 40, ranks_per_node=node),
        pipeline=Pipeline(stages=stages, microbatches=4, stage_ranks=each),
    )
    assert list(problem.nodes) == found


def test_a_stage_that_straddles_nodes_moves_no_more_than_the_fuller_one_has_room_for() -> None:
    """Of four stages of three ranks the third has two on the first node of eight, and one on the second."""
    block = layer(matmuls=None)
    budgets = Budgets(device_bytes=6 * block.full_bytes, host_bytes=5000, ranks_per_node=8)
    pipeline = Pipeline(stages=4, microbatches=8, stage_ranks=3)
    plan = plan_activations(profile_of(*[block] * 16), machine(node_d2h_bytes_per_s=400.0), budgets, pipeline)
    host = [stage.peak_host_bytes for stage in plan.stages]
    nodes = [3 * host[0] + 3 * host[1] + 2 * host[2], host[2] + 3 * host[3]]
    assert 0.9 * 5000 < nodes[0] <= 5000
    assert nodes[1] <= 5000
    for host_bytes, fits in ((nodes[0], True), (nodes[0] - 400, False)):
        scarce = dataclasses.replace(budgets, host_bytes=host_bytes)
        tight = dataclasses.replace(plan, problem=dataclasses.replace(plan.problem, budgets=scarce))
        violation = check_plan(tight)
        assert (violation is None) is fits, violation
        assert bool(simulate(tight).overflows) is not fits


@pytest.mark.parametrize("stage", range(4))
def test_a_stage_that_is_planned_alone_is_predicted_as_in_the_whole(stage: int) -> None:
    block = layer()
    whole = ActivationProblem(
        profile=profile_of(*[block] * 16),
        hardware=machine(),
        budgets=Budgets(device_bytes=1 << 40, host_bytes=1 << 40),
        pipeline=Pipeline(stages=4, microbatches=8),
    )
    half = LayerPlan(point=MATMULS, kept=0.5, host=0.5)
    part = (half, half, half, LayerPlan())
    alone = dataclasses.replace(
        whole, profile=profile_of(*[block] * 4), pipeline=Pipeline(microbatches=8, held=4 - stage)
    )
    assert predict_stages(alone, part) == (predict_stages(whole, part * 4)[stage],)
    plan = ActivationPlan(problem=alone, layers=part, stages=predict_stages(alone, part))
    assert plan_from_json(plan_to_json(plan)) == plan
    assert check_plan(plan) is None
    assert verify_by_simulation(plan).step_s == pytest.approx(plan.step_s, rel=0.02)


@pytest.mark.parametrize("wrong", [{"stages": 2, "held": 1}, {"held": 0}, {"microbatches": 2, "held": 3}])
def test_a_stage_holds_no_more_microbatches_than_there_are_and_speaks_for_itself_alone(wrong: dict[str, int]) -> None:
    with pytest.raises(PlanError, match="do not hold"):
        Pipeline(**wrong)


def test_copies_both_ways_never_ask_for_more_than_a_shared_link() -> None:
    """Out and in of a microbatch, added up, fit through the duplex rate in the time the plan takes."""
    for seed, ratio in itertools.product(range(12), (1.0, 1.5)):
        problem = random_problem(seed, layers=8)
        lanes = problem.hardware.lanes(1)
        shared = max(lanes.d2h_bytes_per_s, lanes.h2d_bytes_per_s) * ratio
        problem = dataclasses.replace(
            problem, hardware=dataclasses.replace(problem.hardware, duplex_bytes_per_s=shared)
        )
        try:
            plan = solve_problem(problem)
        except Infeasible:
            continue
        stage = plan.stages[0]
        assert 2 * (stage.peak_host_bytes + stage.peak_disk_bytes) <= shared * stage.microbatch_s * (1 + 1e-9) + 8


def test_eighty_layers_solve_in_less_than_a_second_and_a_replan_of_32_is_quick() -> None:
    begin = time.thread_time()
    problem = random_problem(1, layers=80, classes=4)
    assert PlanModel(problem).solve()
    assert time.thread_time() - begin < 1.0, "of this thread's own time: other programs do not count"
    begin = time.thread_time()
    for seed in range(10):
        PlanModel(random_problem(seed, layers=32)).solve()
    assert (time.thread_time() - begin) / 10 < 0.05


@pytest.mark.parametrize("extra", [0, 1, 3])
def test_of_plans_that_take_equally_long_one_that_moves_no_more_than_it_must_is_taken(extra: int) -> None:
    block = layer(always=20 << 20, all=140 << 20, matmuls=None, attention=None)
    fast = machine(d2h_bytes_per_s=1e12, h2d_bytes_per_s=1e12, duplex_bytes_per_s=2e12)
    budgets = Budgets(device_bytes=(4 + extra) * block.full_bytes, host_bytes=1 << 40)
    plan = solve_problem(ActivationProblem(profile=profile_of(*[block] * 9), hardware=fast, budgets=budgets))
    assert plan.stages[0].peak_host_bytes == pytest.approx((9 - 4 - extra) * block.full_bytes, rel=1e-4)


def test_the_solver_keeps_nothing_of_the_program_that_first_needs_it() -> None:
    """PuLP keeps errors of its import: with their frames it would keep a training step's model for ever."""
    program = """
import gc, weakref

class Model:
    pass

def step():
    model = Model()
    import memo.mip.activation.solver, memo.mip.address.milp
    return weakref.ref(model)

model = step()
gc.collect()
assert model() is None
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_the_name_that_a_first_solver_prints_is_on_no_output() -> None:
    """As HiGHS 1.16 does it: by C, once in a process."""
    prints = (
        "import ctypes, highspy\n"
        "made, told = highspy.Highs.__init__, []\n"
        "def make(self):\n"
        "    told or told.append(ctypes.CDLL(None).printf(b'Running HiGHS 1.16.0\\n'))\n"
        "    made(self)\n"
        "highspy.Highs.__init__, highspy.HIGHS_VERSION_MINOR = make, 16\n"
        "print('{')\n"
        "import memo.mip.solvers\n"
        "highspy.Highs()\n"
        "assert told, 'nothing was printed'\n"
        "print('}')\n"
    )
    done = subprocess.run([sys.executable, "-c", prints], capture_output=True, text=True, check=False, cwd="/")
    assert (done.returncode, done.stdout) == (0, "{\n}\n"), done.stderr
