"""Part of a pipeline's plan for one stage, as a plan of its own for the stage's ranks.

Owns the extraction alone. The part keeps the whole plan's signature, its rates and the prediction of the stage; its
host and disk budgets are what the stage may take of them, as if the node had no other stage.
"""

from __future__ import annotations

import dataclasses

from memo.mip.activation.cost import rounding_bytes
from memo.mip.activation.plan import ActivationPlan, Pipeline, StageTurns
from memo.mip.activation.stage_view import StageView
from memo.mip.inputs.profile import EmbeddingOrHeadProfile, StaticBytes


def lower_tier_nbytes(plan: ActivationPlan, stage: int = 0) -> tuple[int, int]:
    """Bytes of (host, disk) that one rank of a stage may take, including the excess of whole storages and pages."""
    view = plan.problem.stages[stage]
    rounding = rounding_bytes(view, divided=any(plan.layers[index].divided for index in view.indices))
    known = plan.stages[stage]
    rounding += 1  # predicted peaks are rounded to bytes
    host, disk = known.peak_host_bytes, known.peak_disk_bytes
    return host and host + rounding, disk and disk + rounding


def extract_stage_plan(plan: ActivationPlan, stage: int) -> ActivationPlan:
    """Extracts the plan of one stage: its layers, chunk after chunk, with the whole pipeline's microbatches in flight.

    Returns:
        A plan of one stage that can be checked and run by itself.
    """
    problem, view = plan.problem, plan.problem.stages[stage]
    profile, machine, own = problem.profile, view.machine, view.indices
    ranks = machine.budgets.ranks_per_node
    host, disk = lower_tier_nbytes(plan, stage)
    embedding = profile.embedding if view.has_embedding else EmbeddingOrHeadProfile()
    messages = problem.message_bytes(stage)  # they stand all the time, and the stage alone has no neighbours
    return dataclasses.replace(
        plan,
        problem=dataclasses.replace(
            problem,
            profile=dataclasses.replace(
                profile,
                layers=tuple(profile.layers[index] for index in own),
                embedding=dataclasses.replace(embedding, static=embedding.static + StaticBytes(messages=messages)),
                head=profile.head if view.has_head else EmbeddingOrHeadProfile(),
                optimizer_s=machine.optimizer_s,
                optimizer_exchange_s=machine.optimizer_exchange_s,
                send_s=machine.send_s,
                link_share=machine.link_share,
            ),
            hardware=machine.hardware,
            machines=(),
            budgets=dataclasses.replace(
                machine.budgets, host_bytes=ranks * host, disk_bytes=ranks * disk, disk_wear_bytes_per_day=None
            ),
            pipeline=_alone(view),
        ),
        layers=tuple(plan.layers[index] for index in own),
        stages=(plan.stages[stage],),
    )


def _alone(stage: StageView) -> Pipeline:
    pipeline = stage.pipeline
    if pipeline.chunks == 1:
        return Pipeline(microbatches=pipeline.microbatches, held=pipeline.in_flight(stage.number))
    own = StageTurns(layers=tuple(map(len, stage.chunks)), turns=pipeline.turns(stage.number))
    return Pipeline(microbatches=pipeline.microbatches, own=own)
