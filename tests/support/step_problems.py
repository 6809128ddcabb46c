"""Random steps for the planner: every schedule, one layer a chunk or many, heavy ends, any budgets, from a seed."""

from __future__ import annotations

import dataclasses
import random

from activation_problems import MIB, random_problem, with_curves

from memo.mip.activation import ActivationProblem, Budgets, LayerPlan, Pipeline, device_peak_candidates, predict_stages
from memo.mip.inputs import EmbeddingOrHeadProfile, LayerProfile, PipelineSchedule, StaticBytes

_MOST_LAYERS = 40


def random_step(seed: int) -> ActivationProblem:
    """A problem that is legal, and that most often has a plan."""
    draw = random.Random(seed)
    pipeline = _pipeline(draw)
    places = pipeline.stages * pipeline.chunks
    layers = places if draw.random() < 0.4 else min(places * draw.randint(1, 3) + draw.randrange(places), _MOST_LAYERS)
    layers = max(layers, places)
    problem = random_problem(seed, layers=layers, classes=draw.randint(1, 3), pipeline=pipeline)
    kind = draw.random()
    if kind < 0.1:
        problem = with_curves(problem, draw.randint(2, 5), seed=seed, held=draw.random() < 0.5)
    elif kind < 0.2:
        problem = with_curves(problem, draw.randint(2, 4), seed=seed, held=draw.random() < 0.5)
    communicates = draw.random() < 0.4
    profile = dataclasses.replace(
        problem.profile,
        classes=tuple(_layer(draw, layer, communicates=communicates) for layer in problem.profile.classes),
        embedding=_end(draw, weight=draw.choice([0, 0, 1, 6])),
        head=_end(draw, weight=draw.choice([0, 1, 3, 10])),
        optimizer_s=draw.choice([0.0, draw.uniform(0.0, 20.0)]),
        send_s=draw.choice([0.0, draw.uniform(0.0, 2.0)]) if communicates else 0.0,
    )
    problem = dataclasses.replace(problem, profile=profile, budgets=_lower_tiers(draw, problem))
    return dataclasses.replace(
        problem, budgets=dataclasses.replace(problem.budgets, device_bytes=_device(draw, problem))
    )


def _pipeline(draw: random.Random) -> Pipeline:
    schedule = draw.choice(list(PipelineSchedule))
    chunks = schedule.default_chunks
    if schedule in (PipelineSchedule.INTERLEAVED, PipelineSchedule.ZERO_BUBBLE):
        chunks = draw.choice([2, 2, 3, 4, 6])
    stages = draw.randint(2 if chunks > 1 else 1, 6 if chunks < 4 else 4)
    counts = range(1, 3 * stages + 4)
    legal = [count for count in counts if chunks == 1 or schedule.reason_unsupported(count, stages) is None]
    ranks = draw.choice([0, 1, draw.randint(1, 12)])
    return Pipeline(stages=stages, microbatches=draw.choice(legal), stage_ranks=ranks, schedule=schedule, chunks=chunks)


def _layer(draw: random.Random, layer: LayerProfile, *, communicates: bool) -> LayerProfile:
    found: dict[str, float | int] = {}
    if draw.random() < 0.5:
        found |= {"storages": draw.randint(1, 20), "largest_storage_bytes": draw.randint(1, 20 * MIB)}
    if communicates:
        for name in ("gather_s", "reduce_s", "sync_s"):
            found[name] = draw.choice([0.0, draw.uniform(0.0, 1.5 * layer.backward_s)])
    return dataclasses.replace(layer, **found)  # type: ignore[arg-type]


def _end(draw: random.Random, *, weight: int) -> EmbeddingOrHeadProfile:
    """An end of about so many layers' bytes and seconds."""
    return EmbeddingOrHeadProfile(
        forward_s=weight * draw.uniform(0.0, 10.0),
        backward_s=weight * draw.uniform(0.0, 20.0),
        saved_bytes=int(weight * draw.uniform(0.0, 100.0) * MIB),
        transient_bytes=int(weight * draw.uniform(0.0, 200.0) * MIB),
        static=StaticBytes(other=int(weight * draw.uniform(0.0, 50.0) * MIB)),
    )


def _lower_tiers(draw: random.Random, problem: ActivationProblem) -> Budgets:
    """Tiers of nothing, next to nothing, a part or plenty of what the ranks of a node save in a step."""
    pipeline, ranks = problem.pipeline, draw.randint(1, 8)
    everything = ranks * min(pipeline.microbatches, 2 * pipeline.stages) * problem.budgets.disk_bytes
    everything = everything or ranks * sum(layer.full_bytes for layer in problem.profile.layer_profiles())
    return dataclasses.replace(
        problem.budgets,
        host_bytes=int(draw.choice([0.0, 0.01, 0.1, 0.5, 3.0]) * everything),
        disk_bytes=int(draw.choice([0.0, 0.0, 0.1, 3.0]) * everything),
        ranks_per_node=ranks,
    )


def _device(draw: random.Random, problem: ActivationProblem) -> int:
    """A budget from what the ends and the running layers take in any case to a little more than everything."""
    least = max(
        place.resident_bytes
        for stage in range(problem.pipeline.stages)
        for place in device_peak_candidates(problem.stages[stage])
    )
    everything = predict_stages(problem, [LayerPlan()] * len(problem.profile.layers))
    most = max(stage.peak_device_bytes for stage in everything)
    return least + int(draw.choice([draw.uniform(0.0, 0.2), draw.uniform(0.0, 1.05)]) * (most - least))
