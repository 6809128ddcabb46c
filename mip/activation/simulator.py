"""Simulation of one training step under an activation plan, event by event, independently of how the plan was made.

Owns the way from a plan to each layer's work, and the order of microbatches among pipeline stages. Shares only the data
types with the planner: the two are compared before a plan is used.

    plan ── layer_work ──▶ LayerWork each ── Stage (one rank of each pipeline stage) ──▶ Simulation

Ranks of a node act alike, so each has its share of links, disks and host memory. Bytes are whole: the fractions of a
layer are rounded down to bytes for the device and each tier, and the remainder counts as recomputed, so that rounding
cannot make a plan that fits to the last byte exceed a budget.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence

from memo.errors import PlanInvalid
from memo.events import TierName
from memo.mip.activation.plan import ActivationPlan, ActivationProblem, LayerPlan
from memo.mip.activation.stage_view import StageView
from memo.mip.inputs.pipeline_schedules import Pass
from memo.mip.inputs.profile import EmbeddingOrHeadProfile, LayerProfile
from memo.mip.simulate.result import EndWork, LayerWork, Part, Simulation, StageSimulation
from memo.mip.simulate.stage import SimulatedStage
from memo.units import format_bytes

MAX_CALLS = 200_000
"""Largest product of layers and microbatches; each takes about 20 microseconds and 3 KiB."""
_ALMOST = 1e-6
"""Fraction of a byte that floating-point error may take from a whole one."""


def simulate(plan: ActivationPlan, problem: ActivationProblem | None = None) -> Simulation:
    """Simulates one step under a plan.

    Args:
        plan: the plan of each layer.
        problem: profile, hardware and budgets to simulate on, with as many layers; the plan's own by default.

    Raises:
        PlanInvalid: the plan is of another model, moves bytes over a missing link, or has too many microbatches.
    """
    problem = dataclasses.replace(problem or plan.problem, overlap=plan.problem.overlap)
    if len(problem.profile.layers) != len(plan.layers):
        raise PlanInvalid(f"the plan has {len(plan.layers)} layers and the profile {len(problem.profile.layers)}")
    pipeline = problem.pipeline
    _require_playable(pipeline.microbatches, len(plan.layers))
    stages = [
        _stage(plan.layers, view, budgets={TierName.DEVICE: view.machine.budgets.device_bytes})
        for view in problem.stages
    ]
    _run(stages, problem)
    if problem.machines:  # optimizers run when the last stage has its gradients
        ready_s = max(stage.reduced_s for stage in stages)
        for stage in stages:
            stage.idle(ready_s)
    for stage, view in zip(stages, problem.stages, strict=True):
        stage.step(view.machine.optimizer_s, view.machine.optimizer_exchange_s)
    results = [stage.result() for stage in stages]
    return Simulation(
        step_s=max(stage.now_s for stage in stages),
        stages=tuple(_with_node_budgets(results, problem, number) for number in range(len(results))),
    )


def simulate_stage(plan: ActivationPlan, number: int) -> StageSimulation:
    """Simulates one stage, as if no other one kept it waiting and its device had room for all that it reloads.

    Returns:
        Its passes until all gradients are reduced; of a stage of one chunk those of the microbatches in flight, since
        all that follow are like them.

    Raises:
        PlanInvalid: these are too many.
    """
    pipeline = plan.problem.pipeline
    if pipeline.chunks > 1:
        order = [(turn.chunk, turn.kind) for turn in pipeline.turns(number)]
    else:
        order = [(0, kind) for kind in (Pass.FORWARD, Pass.BACKWARD) for _ in range(pipeline.in_flight(number))]
    _require_playable(len(order) // 2, -(-len(plan.layers) // pipeline.stages))
    stage = _stage(plan.layers, plan.problem.stages[number], budgets={})
    for left, (chunk, kind) in zip(reversed(range(len(order))), order, strict=True):
        if kind is Pass.FORWARD:
            stage.forward(chunk)
        else:
            stage.backward(last=not left)
    stage.step(0.0)
    return stage.result()


def _require_playable(microbatches: int, layers: int) -> None:
    if microbatches * layers > MAX_CALLS:
        raise PlanInvalid(
            f"{microbatches} microbatches of {layers} layers are more than the {MAX_CALLS} passes that are simulated; a "
            "step of fewer microbatches shows the same"
        )


def require_within_budgets(simulation: Simulation) -> None:
    """Checks the simulated peaks.

    Raises:
        PlanInvalid: the step breaks a budget; the message names the stage, the tier, the moment and the bytes.
    """
    for number, peak in simulation.overflows:
        stage = f"stage {number}: " if len(simulation.stages) > 1 else ""
        raise PlanInvalid(
            f"{stage}in {peak.where}, {peak.t_s:.3f} s into the step, {peak.tier} holds "
            f"{format_bytes(peak.nbytes)}, {format_bytes(peak.over_nbytes, up=True)} more than its budget of "
            f"{format_bytes(peak.budget_nbytes or 0)}"
        )


def layer_work(name: str, layer: LayerProfile, plan: LayerPlan) -> LayerWork:
    """Work of a layer under its plan."""
    saved = plan.saved_bytes(layer)
    kept, host, disk = (math.floor(saved * share + _ALMOST) for share in (plan.kept, plan.host, plan.disk))
    whole = layer.full_bytes + plan.beside_bytes(layer)
    recompute_s = plan.recompute_s(layer)
    encode_s, decode_s = plan.coding_s(layer)
    in_host, on_disk = (math.floor(nbytes + _ALMOST) for nbytes in plan.moved_bytes(layer))
    return LayerWork(
        name=name,
        forward_s=layer.forward_s + encode_s,
        backward_s=layer.backward_s,
        recompute_s=recompute_s,
        decode_s=decode_s,
        forward_exchange_s=layer.forward_exchange_s,
        backward_exchange_s=layer.backward_exchange_s,
        gather_s=layer.gather_s,
        reduce_s=layer.reduce_s,
        sync_s=layer.sync_s,
        nbytes={
            Part.KEPT: kept,
            Part.HOST: host,
            Part.DISK: disk,
            Part.RECOMPUTED: whole - kept - host - disk,
        },
        tier_nbytes={Part.HOST: in_host, Part.DISK: on_disk},
        between_nbytes=layer.between_bytes,
        forward_transient_nbytes=layer.forward_transient_bytes,
        backward_transient_nbytes=layer.backward_transient_bytes,
        recompute_held_nbytes=plan.held_bytes(layer),
        absent_nbytes=plan.absent_bytes(layer),
    )


def _stage(plans: Sequence[LayerPlan], view: StageView, *, budgets: Mapping[TierName, int]) -> SimulatedStage:
    profile, pipeline = view.problem.profile, view.pipeline
    known = profile.layer_profiles()
    static = sum(layer.static_bytes for layer in view.layers) + sum(end.static_bytes for end in view.ends)
    static += view.problem.message_bytes(view.number)
    return SimulatedStage(
        *([layer_work(f"layers.{layer}", known[layer], plans[layer]) for layer in chunk] for chunk in view.chunks),
        turns=pipeline.turns(view.number) if pipeline.chunks > 1 else (),
        rates=view.machine.lanes,
        static_nbytes=static,
        budgets=budgets,
        overlap=view.problem.overlap,
        embedding=_end_work("embedding", profile.embedding) if view.has_embedding else None,
        head=_end_work("head", profile.head) if view.has_head else None,
    )


def _with_node_budgets(stages: Sequence[StageSimulation], problem: ActivationProblem, number: int) -> StageSimulation:
    """Sets the budgets of a stage's lower tiers: what the node's other stages leave, divided among its ranks."""
    budgets, peaks = problem.machine_of(number).budgets, []
    for peak in stages[number].peaks:
        if peak.tier is not TierName.DEVICE:
            node_bytes = budgets.host_bytes if peak.tier is TierName.HOST else budgets.disk_bytes
            left = []
            for node in problem.nodes:
                if number in node:
                    others = sum(
                        ranks * stages[other].peak(peak.tier).nbytes for other, ranks in node.items() if other != number
                    )
                    left.append(max(0, node_bytes - others) // node[number])
            peak = dataclasses.replace(peak, budget_nbytes=min(left))
        peaks.append(peak)
    return dataclasses.replace(stages[number], peaks=tuple(peaks))


def _end_work(name: str, end: EmbeddingOrHeadProfile) -> EndWork:
    return EndWork(
        name=name,
        forward_s=end.forward_s,
        backward_s=end.backward_s,
        forward_exchange_s=end.forward_exchange_s,
        backward_exchange_s=end.backward_exchange_s,
        sync_s=end.sync_s,
        saved_nbytes=end.saved_bytes,
        transient_nbytes=end.transient_bytes,
    )


def _run(stages: Sequence[SimulatedStage], problem: ActivationProblem) -> None:
    """Runs every stage's turns; a pass begins when its stage is free and the neighbour's part has arrived.

    Stages share nothing but these times, so each pass can be played as soon as the time it waits for is known. A stage
    that is planned alone waits for no other.
    """
    pipeline = problem.pipeline
    stage_of = {place: number for number in range(len(stages)) for place in pipeline.chunk_positions(number)}
    waiting = [collections.deque(pipeline.turns(number)) for number in range(len(stages))]
    # By place in the pipeline, microbatch and whether forward: when the next place has it.
    done: dict[tuple[int, int, bool], float] = {}
    busy_s: collections.defaultdict[tuple[int, int], float] = collections.defaultdict(
        float
    )  # a link, by its two stages
    ends = -1 if pipeline.own is not None else pipeline.chunks * len(stages)
    while any(waiting):
        for number, stage in enumerate(stages):
            places = pipeline.chunk_positions(number)
            while waiting[number]:
                turn = waiting[number][0]
                forward = turn.kind is Pass.FORWARD
                giver = places[turn.chunk] + (-1 if forward else 1)
                if 0 <= giver < ends and turn.kind is not Pass.WEIGHT:
                    if (giver, turn.microbatch, forward) not in done:
                        break
                    stage.idle(done[giver, turn.microbatch, forward])
                waiting[number].popleft()
                if forward:
                    stage.forward(turn.chunk)
                else:
                    stage.backward(last=not waiting[number])
                if turn.kind is not Pass.WEIGHT:
                    place = places[turn.chunk]
                    taker, there_s = stage_of.get(place + (1 if forward else -1), number), stage.now_s
                    if taker != number:  # in a V one stage hands to itself
                        there_s = max(there_s, busy_s[number, taker]) + problem.send_s(number, taker)
                        busy_s[number, taker] = there_s
                    done[place, turn.microbatch, forward] = there_s
