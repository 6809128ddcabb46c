"""Random small clusters and models, on which memory, links and pipelines bind in turn."""

from __future__ import annotations

import dataclasses
import random

from memo.gpt import Precision
from memo.gpt.arithmetic import Layout, Optimizer
from memo.gpt.attention_pattern import AttentionPattern
from memo.gpt.config import GPTConfig, MoeConfig
from memo.mip.activation import Budgets, LayerPlan, device_peak_candidates, predict_stages
from memo.mip.inputs import Hardware, PipelineSchedule
from memo.mip.inputs.network import Network
from memo.search import Candidate, Request, Setting, Shape, Space

MIB = 1 << 20


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
        layout=Layout(tokens=tokens),
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


def _machine(chance: random.Random, gpus: int) -> Hardware:
    """A slow GPU, so that a small model takes as long as a large one does; links from far too slow to fast enough."""
    link = 10 ** chance.uniform(7.5, 10)
    return Hardware(
        name="small",
        peak_flops=10 ** chance.uniform(11.5, 13),
        matmul_efficiency=chance.uniform(0.4, 0.9),
        attention_efficiency=chance.uniform(0.3, 0.8),
        device_bytes=1 << 40,
        hbm_bytes_per_s=10 ** chance.uniform(10, 11.5),
        d2h_bytes_per_s=link,
        h2d_bytes_per_s=link * chance.uniform(0.5, 2),
        duplex_bytes_per_s=link * chance.uniform(1, 2),
        node_d2h_bytes_per_s=link * chance.uniform(0.5, gpus),
        node_h2d_bytes_per_s=link * chance.uniform(0.5, gpus),
        nvlink_bytes_per_s=10 ** chance.uniform(8, 11),
        gpus_per_node=gpus,
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
    least = max(place.resident_bytes for stage in stages for place in device_peak_candidates(problem, stage))
    saved = sum(layer.full_bytes for layer in problem.profile.layer_profiles())
    return Budgets(
        device_bytes=round(least + (most - least) * chance.uniform(0.0, 1.2)) + chance.choice([0, MIB]),
        host_bytes=chance.choice([0, round(saved * space.gpus_per_node * 10 ** chance.uniform(-1, 1))]),
        disk_bytes=chance.choice([0, 0, round(saved * space.gpus_per_node * 10 ** chance.uniform(-1, 1))]),
    )


def all_candidates(space: Space) -> list[Candidate]:
    """Every candidate of a space."""
    return [
        candidate
        for shape in space.shapes
        for setting in space.settings(shape)
        for candidate in space.candidates(shape, setting)
    ]


__all__ = ["Setting", "Shape", "all_candidates", "random_space"]
