"""`memo plan --cluster`: a layout on groups of nodes that are not alike, on the best of its placements.

Owns the space that the flags describe, and what is told of the placements. The choice is the search's, of one layout: every
placement with equal stages and with stages of their group's speed; where one does not fit, with fewer layers on the fullest
stages; and from the best on with single layers on other stages as long as that makes the step shorter.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import math
from typing import TYPE_CHECKING, Any

from memo.cli.inputs.budgets import budgets_of
from memo.cli.planning.request import parse_request
from memo.cli.terminal.file_kinds import FileKind, require_kind
from memo.errors import UsageError
from memo.gpt import EmbeddingGradients
from memo.mip.activation import Budgets, DoesNotFit, find_plan, layers_of_runs, solve_mlp_tiles
from memo.mip.cluster import NodeGroup, communication, read_cluster
from memo.search import MOST_PLACEMENTS, Candidate, Planned, Setting, Shape, Space, search_layouts
from memo.units import format_duration, text_table

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memo.mip.activation import ActivationPlan

MOST_ROWS = 10


def space_on_cluster(args: argparse.Namespace) -> Space:
    """The space of a cluster's file and the flags, with the request's layout and nothing else fixed.

    Its machine is of equal nodes of as many GPUs as divide every node of the cluster.

    Raises:
        UsageError: a flag is invalid.
        PlanError: the file cannot be read.
    """
    require_kind(args.cluster, FileKind.CLUSTER)
    cluster = read_cluster(args.cluster)
    args = argparse.Namespace(**{**vars(args), "gpus": cluster.gpus if args.gpus is None else args.gpus})
    machines = [group.machine for group in cluster.groups]
    request = parse_request(args, machine=machines[0])
    each = math.gcd(*(machine.gpus_per_node for machine in machines))
    joined = max(machines, key=lambda machine: machine.network.nics_per_node).network
    if not joined.nics_per_node and cluster.gpus > each:
        joined = dataclasses.replace(joined, nics_per_node=1)  # of the connections; placements know them
    machine = dataclasses.replace(machines[0], gpus_per_node=each, network=joined)
    return Space(
        request=dataclasses.replace(request, machine=machine),
        nodes=cluster.gpus // each,
        global_batch=request.layout.batch * request.layout.replicas * request.accumulate,
        cluster=cluster,
        budgets={group.name: _budgets(args, group) for group in cluster.groups},
    )


def plan_on_cluster(space: Space) -> tuple[ActivationPlan, tuple[str, ...], dict[str, Any]]:
    """The plan with the shortest step of all placements of the request's layout.

    Returns:
        The plan, and what it was chosen from, in words and as an object.

    Raises:
        UsageError: the layout has no place on the cluster.
        DoesNotFit: no placement fits; the message is that of the one that lacks least.
    """
    request, layout, cluster = space.request, space.request.layout, space.cluster
    assert cluster is not None
    placements = cluster.placements(layout)
    shape = Shape(layout.pp, layout.replicas, layout.cp, layout.tp, layout.ring, layout.ep)
    equal = [
        Candidate(
            shape=shape,
            setting=Setting(layout.batch, request.accumulate),
            schedule=request.schedule,
            chunks=request.pipeline.chunks,
            stage_layers=request.stage_layers,
            zero=request.zero,
            sparse_embedding=request.embedding is EmbeddingGradients.SPARSE,
            places=placement.places,
        )
        for placement in itertools.islice(placements, MOST_PLACEMENTS)
    ]
    left_out = next(placements, None) is not None
    candidates = [*equal, *(other for one in equal for other in space.further(one))]
    found = search_layouts(space, candidates=candidates, wanted=1)
    if not found.best:
        raise _least_misfit(space, candidates)
    best = found.best[0]
    steps = {one.candidate: one.bound_s for one in found.closed if one.candidate and math.isfinite(one.bound_s)}
    plans = {one.candidate: one.plan for one in found.planned} | {best.candidate: _with_rows(space, best)}
    steps |= {candidate: plan.step_s for candidate, plan in plans.items()}
    steps = {candidate: steps[candidate] for candidate in (best.candidate, *candidates) if candidate in steps}
    rows, summaries = _compared(space, steps, plans)
    header = ("placement", "layers of the stages", "step", "collectives: tp, cp", "dp", "messages: pp")
    text = text_table(header, rows[:MOST_ROWS])
    if len(rows) > MOST_ROWS:
        text += f"\nand {len(rows) - MOST_ROWS} others, which are slower"
    if left_out:
        text += f"\nmore than {MOST_PLACEMENTS} placements: the further ones were not looked at"
    lines = (f"best placement: {rows[0][0]}", text)
    return plans[best.candidate], lines, {"placements": summaries, "placements_left_out": left_out}


def _compared(
    space: Space, steps: Mapping[Candidate, float], plans: Mapping[Candidate, ActivationPlan]
) -> tuple[list[tuple[str, ...]], list[dict[str, Any]]]:
    """Rows and objects of candidates by their steps, which are bounds of those without a plan."""
    rows, summaries = [], []
    for candidate in sorted(steps, key=lambda one: steps[one]):
        plan, placement = plans.get(candidate), space.placement(candidate)
        assert placement is not None
        problem = space.problem(candidate, space.request.tiles[0])
        exchanged, layers, step = communication(problem), layers_of_runs(problem), format_duration(steps[candidate])
        parts = (exchanged.tensor_s, exchanged.data_s, exchanged.pipeline_s)
        step = step if plan else f"at least {step}"
        rows.append((placement.describe(), ", ".join(map(str, layers)), step, *map(format_duration, parts)))
        summaries.append(
            {
                "crossing": str(placement.crossing),
                "stages": placement.named_places,
                "stage_layers": list(layers),
                "planned": plan is not None,
                "step_s": steps[candidate],
                "communication_s": dataclasses.asdict(exchanged),
            }
        )
    return rows, summaries


def _with_rows(space: Space, best: Planned) -> ActivationPlan:
    """The plan with the embedding's gradient exchanged as rows, where that makes the step shorter."""
    profile = best.plan.problem.profile
    exchange, asked = profile.embedding_exchange, space.request.embedding
    if asked is not EmbeddingGradients.AUTO or exchange is None or exchange.sparse_s >= exchange.dense_s:
        return best.plan
    plan = find_plan(space.problem(dataclasses.replace(best.candidate, sparse_embedding=True), profile.mlp_tiles))
    return best.plan if plan is None or plan.step_s >= best.step_s else plan


def _least_misfit(space: Space, candidates: list[Candidate]) -> DoesNotFit | UsageError:
    """The error of the candidate for which the smallest device budget would do."""
    refused: dict[float, DoesNotFit | UsageError] = {}
    for candidate in candidates:
        try:
            solve_mlp_tiles(lambda tiles, one=candidate: space.problem(one, tiles), space.request.tiles)  # type: ignore[misc]
        except DoesNotFit as error:
            refused.setdefault(error.least_bytes["device"], error)
        except UsageError as error:
            refused.setdefault(math.inf, error)
    return refused[min(refused)]


def _budgets(args: argparse.Namespace, group: NodeGroup) -> Budgets:
    budgets = budgets_of(args, group.machine)
    return dataclasses.replace(budgets, disk_bytes=budgets.disk_bytes or group.disk_bytes)
