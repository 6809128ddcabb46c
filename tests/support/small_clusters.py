"""Random small clusters and models, on which memory, links and pipelines bind in turn."""

from __future__ import annotations

import dataclasses
import math
import random

from memo.gpt import AttentionPattern, GPTConfig, MoeConfig, Precision
from memo.gpt.arithmetic import Optimizer, StepLayout
from memo.mip.activation import Budgets, LayerPlan, device_peak_candidates, predict_stages
from memo.mip.cluster import Cluster, Connection, NodeGroup
from memo.mip.inputs import AttentionKernel, Hardware, Network, NetworkLevel, PipelineSchedule
from memo.search import Candidate, Request, Setting as Setting, Shape as Shape, Space

MIB = 1 << 20


def uniform_cluster(machine: Hardware, *, nodes: int) -> Cluster:
    """One group of equal nodes."""
    return Cluster(groups=(NodeGroup(name=machine.name, machine=machine, nodes=nodes),))


def random_space(seed: int, *, most_gpus: int = 8, experts: bool = False, pattern: bool = False) -> Space:
    """A space of up to `most_gpus` GPUs and 4 layers, of which some have experts or local attention where that is asked."""
    chance = random.Random(seed)
    nodes = chance.choice([1, 1, 2])
    gpus = chance.choice([size for size in (1, 2, 4, 8) if size * nodes <= most_gpus])
    heads = chance.choice([2, 4, 8])
    config = GPTConfig(
        layers=chance.choice([1, 2, 3, 4]),
        hidden=128,
        heads=heads,
        kv_heads=heads if seed % 4 else max(1, heads // 4),  # which more context-parallel ranks share
        ffn=512,
        max_seq=4096,
        vocab_size=chance.choice([64, 512, 8192]),
        mlp=chance.choice(["gelu", "swiglu"]),
    )
    tokens = chance.choice([1024, 4096])
    precision, tiles = (
        chance.choice([Precision.BF16, Precision.BF16, Precision.FP32]),
        chance.choice([(1,), (1, 2), (1, 4)]),
    )
    if experts:
        moe = MoeConfig(
            experts=chance.choice([2, 4]),
            top_k=chance.choice([1, 2]),
            shared_experts=chance.choice([0, 1]),
            expert_hidden=chance.choice([64, 256]),
            bottleneck=chance.choice([0, 0, 32]),
            every=chance.randint(1, config.layers),
        )
        config, tiles = dataclasses.replace(config, moe=moe), (1,)
    if pattern:
        window, every = chance.choice([1, 64, 512]), chance.randint(0, config.layers)
        config = dataclasses.replace(config, pattern=AttentionPattern(window=window, full_every=every))
    request = Request(
        config=config,
        model="small",
        precision=precision,
        tiles=tiles,
        layout=StepLayout(tokens=tokens),
        profile=None,
        machine=_machine(chance, gpus),
        budgets=Budgets(device_bytes=1 << 40),
        accumulate=1,
        schedule=PipelineSchedule.ONE_F_ONE_B,
        recompute=None,
        zero=3,
        optimizer_offload=False,
        optimizer=Optimizer.ADAMW,
        lora=0,
        chunks=None,
    )
    space = Space(request=request, nodes=nodes, global_batch=chance.choice([1, 2, 4]))
    return dataclasses.replace(space, request=dataclasses.replace(request, budgets=_budgets(chance, space)))


def random_cluster_space(seed: int, *, most_gpus: int = 4) -> Space:
    """The same on two groups of nodes of other machines, with a slow or a fast connection between them."""
    chance = random.Random(f"cluster {seed}")
    space = random_space(seed, most_gpus=2)
    config = space.request.config
    assert isinstance(config, GPTConfig)
    config = dataclasses.replace(config, layers=chance.choice([2, 3, 4]))
    tokens, per_node = space.request.layout.tokens, max(most_gpus // 2, 1)
    groups, base = [], _machine(chance, 1)
    for name in ("a", "b"):
        gpus, faster = chance.choice([1, per_node]), chance.uniform(1, 3)
        own = _machine(chance, gpus) if chance.random() < 0.5 else dataclasses.replace(base, gpus_per_node=gpus)
        own = dataclasses.replace(own, name=name, peak_flops=faster * own.peak_flops)
        groups.append(NodeGroup(name=name, machine=own, nodes=1 if gpus > 1 else chance.choice([1, 1, 2])))
    links = NetworkLevel(name="ethernet", nics_per_node=1, nic_bytes_per_s=10 ** chance.uniform(7, 10), efficiency=0.8)
    cluster = Cluster(groups=tuple(groups), connections=(Connection(between=("a", "b"), links=links),))
    each = math.gcd(*(group.machine.gpus_per_node for group in groups))
    request = dataclasses.replace(
        space.request,
        config=config,
        layout=StepLayout(tokens=tokens),
        machine=dataclasses.replace(groups[0].machine, gpus_per_node=each),
    )
    wide = Budgets(device_bytes=1 << 40)
    found = Space(
        request=request,
        nodes=cluster.gpus // each,
        global_batch=chance.choice([2, 4]),
        cluster=cluster,
        budgets={group.name: dataclasses.replace(wide, ranks_per_node=group.machine.gpus_per_node) for group in groups},
    )
    return dataclasses.replace(found, budgets=_budgets_of_groups(chance, found))


def _budgets_of_groups(chance: random.Random, space: Space) -> dict[str, Budgets]:
    """Budgets of each group around what some candidate needs."""
    assert space.cluster is not None
    candidates = all_candidates(space)
    found = {}
    for group in space.cluster.groups:
        problem = space.problem(chance.choice(candidates))
        kept = predict_stages(problem, [LayerPlan()] * len(problem.profile.layers))
        most = max(stage.peak_device_bytes for stage in kept)
        stages = range(problem.pipeline.stages)
        least = max(place.resident_bytes for stage in stages for place in device_peak_candidates(problem.stages[stage]))
        saved = sum(layer.full_bytes for layer in problem.profile.layer_profiles())
        ranks = group.machine.gpus_per_node
        found[group.name] = Budgets(
            device_bytes=round(least + (most - least) * chance.uniform(0.0, 1.2)) + chance.choice([0, MIB]),
            host_bytes=chance.choice([0, round(saved * ranks * 10 ** chance.uniform(-1, 1))]),
            disk_bytes=chance.choice([0, 0, round(saved * ranks * 10 ** chance.uniform(-1, 1))]),
            ranks_per_node=ranks,
        )
    return found


def _machine(chance: random.Random, gpus: int) -> Hardware:
    """A slow GPU, so that a small model takes as long as a large one does; links from far too slow to fast enough."""
    link = 10 ** chance.uniform(7.5, 10)
    return Hardware(
        name="small",
        peak_flops=10 ** chance.uniform(11.5, 13),
        matmul_efficiency=chance.uniform(0.4, 0.9),
        attention=(AttentionKernel.alike(chance.uniform(0.3, 0.8)),),
        device_bytes=1 << 40,
        hbm_bytes_per_s=10 ** chance.uniform(10, 11.5),
        d2h_bytes_per_s=link,
        h2d_bytes_per_s=link * chance.uniform(0.5, 2),
        duplex_bytes_per_s=link * chance.uniform(1, 2),
        node_d2h_bytes_per_s=link * chance.uniform(0.5, gpus),
        node_h2d_bytes_per_s=link * chance.uniform(0.5, gpus),
        nvlink_bytes_per_s=10 ** chance.uniform(8, 11),
        gpus_per_node=gpus,
        launch_s=0.0,
        host_bytes=1 << 40,
        disk_write_bytes_per_s=chance.choice([0.0, 10 ** chance.uniform(7, 9)]),
        disk_read_bytes_per_s=10 ** chance.uniform(7, 9),
        network=Network(nics_per_node=chance.choice([1, 4]), nic_bytes_per_s=10 ** chance.uniform(7, 10)),
    )


def _budgets(chance: random.Random, space: Space) -> Budgets:
    """Budgets around what some candidate needs: from too little to more than enough."""
    shape = chance.choice(space.shapes)
    setting = chance.choice(space.settings(shape))
    problem = space.request_of(chance.choice(space.candidates(shape, setting))).problem()
    kept = predict_stages(problem, [LayerPlan()] * len(problem.profile.layers))
    most = max(stage.peak_device_bytes for stage in kept)
    stages = range(problem.pipeline.stages)
    least = max(place.resident_bytes for stage in stages for place in device_peak_candidates(problem.stages[stage]))
    saved = sum(layer.full_bytes for layer in problem.profile.layer_profiles())
    return Budgets(
        device_bytes=round(least + (most - least) * chance.uniform(0.0, 1.2)) + chance.choice([0, MIB]),
        host_bytes=chance.choice([0, round(saved * space.gpus_per_node * 10 ** chance.uniform(-1, 1))]),
        disk_bytes=chance.choice([0, 0, round(saved * space.gpus_per_node * 10 ** chance.uniform(-1, 1))]),
    )


def every_division(space: Space) -> list[Candidate]:
    """Every candidate of a space under every numbers of layers of its stages."""
    layers = len(space.problem(all_candidates(space)[0]).profile.layers)
    found: dict[Candidate, None] = {}
    for one in all_candidates(space):
        runs = one.shape.pp * one.chunks
        divisions = _divisions(layers, runs) if one.shape.pp > 1 else [()]
        found.update(dict.fromkeys(dataclasses.replace(one, stage_layers=division) for division in divisions))
    return list(found)


def _divisions(layers: int, runs: int) -> list[tuple[int, ...]]:
    if runs == 1:
        return [(layers,)]
    return [(first, *rest) for first in range(1, layers - runs + 2) for rest in _divisions(layers - first, runs - 1)]


def all_candidates(space: Space) -> list[Candidate]:
    """Every candidate of a space."""
    return [
        candidate
        for shape in space.shapes
        for setting in space.settings(shape)
        for candidate in space.candidates(shape, setting)
    ]
