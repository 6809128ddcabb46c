"""Placements as problems: two clusters by hand, uniform clusters to the bit, and what never gets worse."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
from activation_problems import machine as slow_machine
from small_clusters import uniform_cluster

from memo.errors import UsageError
from memo.gpt import preset
from memo.gpt.arithmetic import StepLayout, derive_profile
from memo.mip.activation import (
    ActivationPlan,
    ActivationProblem,
    Budgets,
    LayerPlan,
    Pipeline,
    predict_stages,
    solve_problem,
)
from memo.mip.cluster import (
    Cluster,
    ClusterPlacement,
    Connection,
    Crossing,
    NodeGroup,
    ProfileOf,
    balanced_layers,
    communication,
    problem_inputs,
)
from memo.mip.inputs import (
    Collectives,
    Hardware,
    LayerProfile,
    Network,
    NetworkLevel,
    PipelineSchedule,
    PointProfile,
    Profile,
    Role,
    Signature,
    hardware_preset,
)
from memo.mip.simulate import verify_by_simulation

GB, MB = 1e9, 1e6
SCHEDULES = (PipelineSchedule.ONE_F_ONE_B, PipelineSchedule.INTERLEAVED, PipelineSchedule.ZERO_BUBBLE_V)


def node(peak_flops: float, *, name: str = "by hand", gpus: int = 2, nics: int = 0) -> Hardware:
    """GPUs that reach one another at 100 GB/s; nothing takes time but bytes and FLOPs."""
    network = Network(
        nics_per_node=nics,
        nic_bytes_per_s=10 * GB if nics else 0.0,
        nic_efficiency=1.0,
        node_efficiency=1.0,
        nic_latency_s=0.0,
        node_latency_s=0.0,
        launch_s=0.0,
    )
    base = slow_machine(peak_flops=peak_flops, nvlink_bytes_per_s=100 * GB, gpus_per_node=gpus)
    return dataclasses.replace(base, name=name, network=network)


def link(one: str, other: str, nic_bytes_per_s: float, **changes: float) -> Connection:
    level = NetworkLevel(name="ethernet", nics_per_node=1, nic_bytes_per_s=nic_bytes_per_s, efficiency=1.0)
    return Connection(between=(one, other), links=level, **changes)


def profile_by_hand(layout: StepLayout, *, layers: int, gradients: float, message: float) -> ProfileOf:
    """Layers of 1 TFLOP forward and 2 backward, whose gradients are summed once a step as they become ready."""

    def profile_of(machine: Hardware, **changes: Any) -> Profile:
        own, times = dataclasses.replace(layout, **changes), Collectives(machine)
        speed = machine.peak_flops * machine.matmul_efficiency
        block = LayerProfile(
            name="block",
            always_bytes=1,
            points=(PointProfile(name="all", saved_bytes=1),),
            forward_s=1e12 / speed,
            backward_s=2e12 / speed,
            sync_s=times.all_reduce_s(gradients, own.data_group(machine.gpus_per_node)),
        )
        return Profile(
            signature=Signature(model="by hand", batch=1, tokens=1024, dtype="bf16", pp=layout.pp),
            role=Role.DERIVED,
            classes=(block,),
            layers=("block",) * layers,
            send_s=times.send_s(message, beyond_node=own.leaves_node(machine.gpus_per_node)),
            send_bytes=message,
        )

    return profile_of


def kept_step_s(problem: ActivationProblem) -> float:
    """Predicted step with everything kept."""
    layers = (LayerPlan(),) * len(problem.profile.layers)
    return ActivationPlan(problem=problem, layers=layers, stages=predict_stages(problem, layers)).step_s


# Two clusters of two GPUs each, of 100 and of 50 TFLOP/s, joined by Ethernet of 1 GB/s: half of it for each GPU of a node.
# A layer takes 10 + 20 ms on the fast one and 20 + 40 ms on the slow one.
TWO = Cluster(
    groups=(
        NodeGroup(name="fast", machine=node(100e12), nodes=1),
        NodeGroup(name="slow", machine=node(50e12), nodes=1),
    ),
    connections=(link("fast", "slow", 1 * GB),),
)
LAYOUT = StepLayout(tokens=1024, gpus=4, pp=2)


def node_budgets(group: NodeGroup) -> Budgets:
    """95 % of a GPU's memory and 80 % of the host's."""
    machine = group.machine
    return Budgets(
        device_bytes=int(0.95 * machine.device_bytes),
        host_bytes=int(0.8 * machine.host_bytes),
        disk_bytes=group.disk_bytes,
        ranks_per_node=machine.gpus_per_node,
    )


def problem_of(
    placement: ClusterPlacement,
    profile_of: ProfileOf,
    budgets_of: Callable[[NodeGroup], Budgets] = node_budgets,
    **given: Any,
) -> ActivationProblem:
    return problem_inputs(placement, profile_of, budgets_of, **given)


def by_crossing(cluster: Cluster, layout: StepLayout) -> dict[Crossing, list[ClusterPlacement]]:
    found: dict[Crossing, list[ClusterPlacement]] = {}
    for placement in cluster.placements(layout):
        found.setdefault(placement.crossing, []).append(placement)
    return found


def test_two_clusters_joined_by_ethernet_by_hand() -> None:
    profile_of = profile_by_hand(LAYOUT, layers=6, gradients=200 * MB, message=50 * MB)
    found = by_crossing(TWO, LAYOUT)
    (first, other), (replicas,) = found[Crossing.STAGES], found[Crossing.REPLICAS]
    assert [place.groups for place in first.places] == [(0,), (1,)]

    # Equal stages of 3 layers: 30 + 60 ms and 60 + 120 ms. A message of 50 MB over 0.5 GB/s takes 100 ms.
    #   stage 0   F0 0-30, F1 30-60        there at 130, 230 (the link is free at 130)
    #   stage 1   F0 130-190, B0 190-310, F1 310-370, B1 370-490      back at 410, 590
    #   stage 0   B0 410-470, B1 590-650
    # The gradients of 3 layers, 200 MB each over 100 GB/s: 2 * 200 MB * 1/2 / 100 GB/s = 2 ms, of which the last is
    # exposed. Together 652 ms.
    even = problem_of(first, profile_of, microbatches=2)
    assert even.machines[0].send_s == pytest.approx(0.1)
    assert kept_step_s(even) == pytest.approx(0.652)

    # In proportion to speed, 4 and 2 layers: both 40 + 80 ms.
    #   stage 0   F0 0-40, F1 40-80        there at 140, 240
    #   stage 1   F0 140-180, B0 180-260, F1 260-300, B1 300-380      back at 360, 480
    #   stage 0   B0 360-440, B1 480-560, and 2 ms: 562 ms
    sizes = balanced_layers(first, profile_of, node_budgets)
    assert sizes == (4, 2)
    problem = problem_of(first, profile_of, microbatches=2, layers=sizes)
    assert kept_step_s(problem) == pytest.approx(0.562)
    assert balanced_layers(other, profile_of, node_budgets) == (2, 4)
    exchanged = communication(problem)
    assert exchanged.pipeline_s == pytest.approx(2 * 0.1)
    assert exchanged.data_s == pytest.approx(4 * 0.002)

    # Each replica's pipeline in a cluster of its own, as slow as the slow one's: 60 + 120 ms; a message takes 0.5 ms.
    #   stage 0   F0 0-60, F1 60-120
    #   stage 1   F0 60.5-120.5, B0 120.5-240.5, F1 240.5-300.5, B1 300.5-420.5
    #   stage 0   B0 241-361, B1 421-541
    # Gradients cross the Ethernet: 2 * 200 MB * 1/2 / 0.5 GB/s = 400 ms a layer, from 461 ms on, when the first is ready:
    # 461 + 3 * 400 = 1661 ms.
    problem = problem_of(replicas, profile_of, microbatches=2)
    assert kept_step_s(problem) == pytest.approx(1.661)
    assert communication(problem).data_s == pytest.approx(3 * 0.4)
    assert communication(problem).pipeline_s == pytest.approx(2 * 0.0005)


def test_the_pipeline_crosses_where_bytes_say_so_and_replicas_where_they_do() -> None:
    # With gradients of 1 MB a layer (2 ms over the Ethernet) and messages of 2 GB (4 s over it, 20 ms within a node), the
    # replicas should cross: F1 of stage 0 there at 140, B1 of stage 1 320-440, back at 460, and 120 ms more; the gradients
    # of the last layer 2 ms: 582 ms. A pipeline across takes four messages one after another, 16 s.
    profile_of = profile_by_hand(LAYOUT, layers=6, gradients=1 * MB, message=2 * GB)
    steps = {
        placement.crossing: kept_step_s(problem_of(placement, profile_of, microbatches=2))
        for placement in TWO.placements(LAYOUT)
    }
    assert steps[Crossing.REPLICAS] == pytest.approx(0.582)
    assert steps[Crossing.STAGES] > 8


def test_a_trunk_is_shared_by_all_gpus_that_send_at_once() -> None:
    # 1 GB/s for each node, but 0.4 GB/s in all: each of two GPUs has 0.2, and 50 MB take 250 ms.
    cluster = dataclasses.replace(TWO, connections=(link("fast", "slow", 1 * GB, trunk_bytes_per_s=0.4 * GB),))
    profile_of = profile_by_hand(LAYOUT, layers=6, gradients=200 * MB, message=50 * MB)
    found = by_crossing(cluster, LAYOUT)
    problem = problem_of(found[Crossing.STAGES][0], profile_of)
    assert problem.machines[0].send_s == pytest.approx(0.25)
    # Two stages of one GPU in each cluster reduce their gradients at once: 2 * 200 MB * 1/2 / 0.2 GB/s.
    problem = problem_of(found[Crossing.REPLICAS][0], profile_of)
    assert problem.profile.classes[0].sync_s == pytest.approx(1.0)


# The GPT on uniform clusters


def gpt(layout: StepLayout, *, microbatches: int, model: Any = None) -> ProfileOf:
    config = model or preset("7b", layers=12)

    @functools.cache
    def profile_of(machine: Hardware, **changes: Any) -> Profile:
        return derive_profile(config, machine, dataclasses.replace(layout, **changes), accumulate=microbatches)

    return profile_of


def joined(machine: Hardware, *nodes: int) -> Cluster:
    """A uniform cluster, described as several groups that the same NICs join."""
    network = machine.network
    level = NetworkLevel(
        name="the same",
        nics_per_node=network.nics_per_node,
        nic_bytes_per_s=network.nic_bytes_per_s,
        efficiency=network.nic_efficiency,
        oversubscription=network.oversubscription,
        latency_s=network.nic_latency_s,
    )
    names = [f"part {number}" for number in range(len(nodes))]
    return Cluster(
        groups=tuple(
            NodeGroup(name=name, machine=machine, nodes=count) for name, count in zip(names, nodes, strict=True)
        ),
        connections=tuple(Connection(between=pair, links=level) for pair in itertools.combinations(names, 2)),
    )


UNIFORM = [
    ({"tp": 8, "pp": 4}, (2, 2), 4),  # a stage a node
    ({"tp": 4, "pp": 2}, (2, 2), 4),  # two nodes, which two replicas of each stage fill
    ({"tp": 2, "cp": 2, "pp": 2}, (2, 2), 2),
    ({"tp": 2, "pp": 4}, (1, 1, 1, 1), 8),
    ({"tp": 8, "pp": 4}, (1, 3), 4),
]


@pytest.mark.parametrize("gpu", ["h100", "a800"])
@pytest.mark.parametrize(("sizes", "nodes", "microbatches"), UNIFORM)
def test_a_uniform_cluster_described_as_groups_has_the_same_times_to_the_bit(
    gpu: str, sizes: dict[str, int], nodes: tuple[int, ...], microbatches: int
) -> None:
    machine = dataclasses.replace(hardware_preset(gpu))
    layout = StepLayout(tokens=8192, gpus=32, **sizes)
    profile_of = gpt(layout, microbatches=microbatches)
    budgets = Budgets(device_bytes=40 << 30, host_bytes=1 << 40, ranks_per_node=8)
    pipeline = Pipeline(stages=layout.pp, microbatches=microbatches, stage_ranks=layout.stage_gpus)
    plain = ActivationProblem(profile=profile_of(machine), hardware=machine, budgets=budgets, pipeline=pipeline)
    (one,) = uniform_cluster(machine, nodes=4).placements(layout)
    given = {"microbatches": microbatches, "budgets_of": lambda group: budgets}
    assert problem_of(one, profile_of, **given) == plain
    problems = [problem_of(placement, profile_of, **given) for placement in joined(machine, *nodes).placements(layout)]
    across = [problem for problem in problems if problem.machines[0].node_ranks == 0]
    assert across
    plan = solve_problem(plain)
    for problem in across:
        again = solve_problem(problem)
        assert (again.step_s, again.stages, again.layers) == (plan.step_s, plan.stages, plan.layers)
        assert verify_by_simulation(again).step_s == verify_by_simulation(plan).step_s


def test_replicas_on_two_groups_of_a_uniform_cluster_have_the_same_times_to_the_bit() -> None:
    machine = hardware_preset("h100")
    layout = StepLayout(tokens=8192, gpus=32, tp=2)
    profile_of = gpt(layout, microbatches=2)
    (one,) = uniform_cluster(machine, nodes=4).placements(layout)
    (two,) = joined(machine, 2, 2).placements(layout)
    assert two.crossing is Crossing.REPLICAS
    plain, across = (problem_of(placement, profile_of, microbatches=2) for placement in (one, two))
    assert across.profile == dataclasses.replace(plain.profile, send_s=across.profile.send_s)
    assert kept_step_s(across) == kept_step_s(plain)


# What never gets worse


def compositions(total: int, parts: int) -> list[tuple[int, ...]]:
    ends = itertools.combinations(range(1, total), parts - 1)
    return [tuple(b - a for a, b in itertools.pairwise((0, *cut, total))) for cut in ends]


def best_step_s(
    cluster: Cluster, layout: StepLayout, profile_of: ProfileOf, *, layers: int, microbatches: int
) -> float:
    """The best of every placement with every division of the layers."""
    return min(
        kept_step_s(problem_of(placement, profile_of, microbatches=microbatches, layers=sizes))
        for placement in cluster.placements(layout)
        for sizes in (compositions(layers, layout.pp) if layout.pp > 1 else [None])
    )


Change = Callable[[Cluster, random.Random], Cluster]


def faster_gpu(cluster: Cluster, draw: random.Random) -> Cluster:
    number = draw.randrange(len(cluster.groups))
    group = cluster.groups[number]
    machine = dataclasses.replace(group.machine, peak_flops=group.machine.peak_flops * draw.uniform(1.0, 3.0))
    return with_group(cluster, number, dataclasses.replace(group, machine=machine))


def faster_network(cluster: Cluster, draw: random.Random) -> Cluster:
    number = draw.randrange(len(cluster.groups))
    group, faster = cluster.groups[number], draw.uniform(1.0, 3.0)
    network = group.machine.network
    network = dataclasses.replace(
        network,
        nic_bytes_per_s=network.nic_bytes_per_s * faster,
        levels=tuple(
            dataclasses.replace(level, oversubscription=max(level.oversubscription / faster, 1.0))
            for level in network.levels
        ),
    )
    machine = dataclasses.replace(
        group.machine, network=network, nvlink_bytes_per_s=group.machine.nvlink_bytes_per_s * faster
    )
    return with_group(cluster, number, dataclasses.replace(group, machine=machine))


def faster_link(cluster: Cluster, draw: random.Random) -> Cluster:
    number, faster = draw.randrange(len(cluster.connections)), draw.uniform(1.0, 4.0)
    found = list(cluster.connections)
    links = found[number].links
    found[number] = dataclasses.replace(
        found[number],
        links=dataclasses.replace(
            links, nic_bytes_per_s=links.nic_bytes_per_s * faster, latency_s=links.latency_s / faster
        ),
        trunk_bytes_per_s=found[number].trunk_bytes_per_s * faster,
    )
    return dataclasses.replace(cluster, connections=tuple(found))


def with_group(cluster: Cluster, number: int, group: NodeGroup) -> Cluster:
    groups = list(cluster.groups)
    groups[number] = group
    return dataclasses.replace(cluster, groups=tuple(groups))


def random_cluster(draw: random.Random) -> Cluster:
    groups = []
    for number in range(draw.randint(2, 3)):
        machine = node(draw.uniform(20, 200) * 1e12, name=f"kind {number}", gpus=draw.choice([1, 2, 4]), nics=1)
        levels = (
            (NetworkLevel(name="pod", nodes=2, oversubscription=draw.uniform(1, 4)),) if draw.random() < 0.5 else ()
        )
        machine = dataclasses.replace(machine, network=dataclasses.replace(machine.network, levels=levels))
        groups.append(NodeGroup(name=f"group {number}", machine=machine, nodes=draw.randint(1, 3)))
    names = [group.name for group in groups]
    connections = [
        link(one, other, draw.uniform(0.05, 20) * GB, trunk_bytes_per_s=draw.choice([0.0, draw.uniform(0.05, 20) * GB]))
        for one, other in itertools.combinations(names, 2)
    ]
    return Cluster(groups=tuple(groups), connections=tuple(connections))


@pytest.mark.parametrize("change", [faster_gpu, faster_network, faster_link])
def test_a_faster_gpu_or_link_never_slows_the_best_placement(change: Change) -> None:
    gained = compared = 0
    for seed in range(60):
        draw = random.Random(seed)
        cluster = random_cluster(draw)
        tp, pp, replicas = draw.choice([1, 2]), draw.choice([1, 2, 3]), draw.choice([1, 2])
        layout = StepLayout(tokens=1024, gpus=tp * pp * replicas, tp=tp, pp=pp)
        if layout.gpus > cluster.gpus:
            continue
        profile_of = profile_by_hand(
            layout, layers=4, gradients=draw.uniform(1, 900) * MB, message=draw.uniform(1, 900) * MB
        )
        given: dict[str, Any] = {"layers": 4, "microbatches": 3}
        try:
            before = best_step_s(cluster, layout, profile_of, **given)
        except UsageError:  # it has no place
            continue
        after = best_step_s(change(cluster, draw), layout, profile_of, **given)
        assert after <= before * (1 + 1e-12), seed
        compared += 1
        gained += after < before * 0.999
    assert compared > 30
    assert gained > 5


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_plans_of_groups_that_differ_pass_the_checker_and_the_simulator(schedule: PipelineSchedule) -> None:
    cluster = Cluster(
        groups=(
            NodeGroup(name="ib", machine=hardware_preset("h100"), nodes=2),
            NodeGroup(name="roce", machine=hardware_preset("a100-40g"), nodes=2),
        ),
        connections=(link("ib", "roce", 3 * GB),),
    )
    layout = StepLayout(tokens=32768, gpus=32, tp=8, pp=4)
    profile_of = gpt(layout, microbatches=8)
    for placement in cluster.placements(layout):
        sizes = balanced_layers(placement, profile_of, node_budgets, schedule=schedule)
        problem = problem_of(placement, profile_of, microbatches=8, layers=sizes, schedule=schedule)
        plan = solve_problem(problem)
        verify_by_simulation(plan)
        names = {problem.profile.layers[index] for index in range(12)}
        assert len(names) == 2, "a layer of each kind of GPU"
        for stage, machine in enumerate(problem.machines):
            assert machine.hardware == placement.machine(stage)
            assert plan.stages[stage].peak_device_bytes <= machine.budgets.device_bytes
