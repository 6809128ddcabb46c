"""`memo plan --cluster`: a layout on groups of nodes that are not alike, each of its placements planned.

Owns the choice: of every placement with equal stages and with stages of their group's speed, the one with the shortest
predicted step; from there single layers move between stages as long as that makes the step shorter.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from memo.cli.inputs.budgets import budgets_of
from memo.cli.planning.request import AUTO, parse_request
from memo.cli.tables.address import table
from memo.cli.terminal.file_kinds import FileKind, require_kind
from memo.errors import UsageError
from memo.gpt import EmbeddingGradients
from memo.mip.activation import (
    ActivationPlan,
    ActivationProblem,
    Budgets,
    DoesNotFit,
    LayerPlan,
    chunk_layers,
    find_plan,
    fits,
    predict_stages,
    solve_mlp_tiles,
    solve_problem,
)
from memo.mip.cluster import Cluster, NodeGroup, Placement, ProfileOf, balanced_layers, communication, read_cluster
from memo.units import format_duration

if TYPE_CHECKING:
    from memo.mip.inputs import Hardware, Profile
    from memo.search import Request

__all__ = ["ClusterPlan", "ClusterRequest"]

MOST_LOOKED_AT, MOST_PLACEMENTS = 1024, 64
"""Placements whose step is estimated, and that are planned."""
MOST_MOVES = 32
"""Layers that are moved between stages of the best one."""
LEAST_SAVING = 1e-9
"""Fraction of a step; smaller savings are errors of rounding."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """A placement with numbers of layers, and its plan."""

    placement: Placement
    layers: tuple[int, ...] | None
    """None: equal ones."""
    plan: ActivationPlan


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ClusterPlan:
    """The best plan, and what it was chosen from."""

    plan: ActivationPlan
    placement: Placement
    lines: tuple[str, ...]
    summary: dict[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ClusterRequest:
    """A request, and the cluster that it is for."""

    request: Request
    cluster: Cluster
    budgets: Mapping[str, Budgets]
    """By the name of the group: those of the flags, or their parts of the group's own memories."""
    profiles: dict[int, ProfileOf] = dataclasses.field(default_factory=dict)
    """Profiles that were derived, by the number of MLP tiles."""

    @classmethod
    def of(cls, args: argparse.Namespace) -> ClusterRequest:
        """Reads the cluster and the flags.

        Raises:
            UsageError: a flag has no meaning with a cluster, or is invalid.
            PlanError: the file cannot be read.
        """
        clashes = {
            "--gpu": args.gpu is not None,
            "--net": args.net is not None,
            "--doctor": args.doctor is not None,
            "--profile": args.profile is not None,
            "--max-seq": args.max_seq,
            "--gpus auto": args.gpus == AUTO,
            f"--sweep {args.sweep}": args.sweep is not None,
            "--optimizer-offload": args.optimizer_offload,
        }
        given = [flag for flag, is_given in clashes.items() if is_given]
        if given:
            raise UsageError(
                f"{given[0]} has no meaning with --cluster, whose file has the machines; leave out one of them"
            )
        require_kind(args.cluster, FileKind.CLUSTER)
        cluster = read_cluster(args.cluster)
        gpus = cluster.gpus if args.gpus is None else args.gpus
        args = argparse.Namespace(**{**vars(args), "gpus": gpus})
        request = parse_request(args, machine=cluster.groups[0].machine)
        budgets = {group.name: _budgets(args, group) for group in cluster.groups}
        return cls(request=request, cluster=cluster, budgets=budgets)

    def plan(self) -> ClusterPlan:
        """The plan with the shortest step of all placements.

        Raises:
            UsageError: the layout has no place on the cluster.
            DoesNotFit: no placement fits; the message is that of the one that lacks least.
        """
        found: list[_Candidate] = []
        refused: list[DoesNotFit | UsageError] = []
        placements = list(itertools.islice(self.cluster.placements(self.request.layout), MOST_LOOKED_AT))
        chosen = self._promising(placements)
        left_out = len(placements) - len(chosen)
        for placement in chosen:
            try:
                for layers in self._divisions(placement):
                    plan = solve_mlp_tiles(self._problems(placement, layers), self.request.tiles)
                    found.append(_Candidate(placement=placement, layers=layers, plan=plan))
            except (DoesNotFit, UsageError) as error:
                refused.append(error)
        if not found:
            raise min(refused, key=_lacking)
        found.sort(key=lambda candidate: candidate.plan.step_s)
        best = found[0] if self.request.stage_layers else self._moved(found[0])
        if best is not found[0]:
            found.insert(0, best)
        best = found[0] = self._with_rows(best)
        return ClusterPlan(
            plan=best.plan,
            placement=best.placement,
            lines=tuple(_lines(found, left_out)),
            summary={"placements": [_summary(candidate) for candidate in found], "placements_left_out": left_out},
        )

    def _promising(self, placements: list[Placement]) -> list[Placement]:
        """The placements with the shortest step if everything could be kept, where there are too many to plan."""
        if len(placements) <= MOST_PLACEMENTS:
            return placements

        def kept_s(placement: Placement) -> float:
            try:
                *_, sizes = self._divisions(placement)
                problem = self._problems(placement, sizes)(self.request.tiles[0])
            except UsageError:
                return math.inf
            layers = (LayerPlan(),) * len(problem.profile.layers)
            return ActivationPlan(problem=problem, layers=layers, stages=predict_stages(problem, layers)).step_s

        return sorted(placements, key=kept_s)[:MOST_PLACEMENTS]

    def _divisions(self, placement: Placement) -> Iterator[tuple[int, ...] | None]:
        """Numbers of layers to try."""
        if self.request.stage_layers:
            yield self.request.stage_layers
            return
        yield None
        pipeline = self.request.pipeline
        if pipeline.stages == 1:
            return
        sizes = balanced_layers(
            placement,
            self._profile_of(self.request.tiles[0]),
            schedule=pipeline.schedule,
            chunks=pipeline.chunks,
            budgets_of=lambda group: self.budgets[group.name],
        )
        if sizes != _sizes(self._problems(placement, None)(self.request.tiles[0])):
            yield sizes

    def _moved(self, best: _Candidate) -> _Candidate:
        """The candidate after moves of single layers from the slowest stage to others, while they shorten the step."""
        for _ in range(MOST_MOVES if best.plan.problem.pipeline.stages > 1 else 0):
            shorter = [plan for plan in self._neighbours(best) if plan.step_s < best.plan.step_s * (1 - LEAST_SAVING)]
            if not shorter:
                break
            plan = min(shorter, key=lambda plan: plan.step_s)
            best = dataclasses.replace(best, layers=_sizes(plan.problem), plan=plan)
        return best

    def _with_rows(self, best: _Candidate) -> _Candidate:
        """The candidate with its embedding's gradient exchanged as rows, where that makes the step shorter."""
        problem = best.plan.problem
        exchange = problem.profile.embedding_exchange
        asked = self.request.embedding
        if asked is not EmbeddingGradients.AUTO or exchange is None or exchange.sparse_s >= exchange.dense_s:
            return best
        request = dataclasses.replace(self.request, embedding=EmbeddingGradients.SPARSE)
        other = dataclasses.replace(self, request=request, profiles={})
        plan = find_plan(other._problems(best.placement, best.layers)(problem.profile.mlp_tiles))
        return best if plan is None or plan.step_s >= best.plan.step_s else dataclasses.replace(best, plan=plan)

    def _neighbours(self, best: _Candidate) -> Iterator[ActivationPlan]:
        """Plans with one layer of the slowest stage on another one."""
        problem = best.plan.problem
        slowest = max(range(len(best.plan.stages)), key=lambda stage: best.plan.stages[stage].microbatch_s)
        sizes, givers = _sizes(problem), problem.pipeline.chunk_positions(slowest)
        for giver in givers:
            for taker in range(len(sizes)):
                if taker in givers or sizes[giver] == 1:
                    continue
                step = {giver: -1, taker: 1}
                layers = tuple(size + step.get(run, 0) for run, size in enumerate(sizes))
                other = self._problems(best.placement, layers)(problem.profile.mlp_tiles)
                if fits(other):
                    yield solve_problem(other)

    def _problems(self, placement: Placement, layers: tuple[int, ...] | None) -> Callable[[int], ActivationProblem]:
        """The problem of a placement by the number of MLP tiles."""
        pipeline = self.request.pipeline

        def of_tiles(tiles: int) -> ActivationProblem:
            return placement.problem_inputs(
                self._profile_of(tiles),
                microbatches=pipeline.microbatches,
                layers=layers,
                schedule=pipeline.schedule,
                chunks=pipeline.chunks,
                budgets_of=lambda group: self.budgets[group.name],
            )

        return of_tiles

    def _profile_of(self, tiles: int) -> ProfileOf:
        layout, request = self.request.layout, self.request

        @functools.lru_cache(maxsize=1024)
        def profile_of(machine: Hardware, **changes: Any) -> Profile:
            return request.profile_on(machine, dataclasses.replace(layout, **changes), tiles=tiles)

        return self.profiles.setdefault(tiles, profile_of)


def _budgets(args: argparse.Namespace, group: NodeGroup) -> Budgets:
    budgets = budgets_of(args, group.machine)
    disk = budgets.disk_bytes if args.nvme != "0" else group.disk_bytes
    return dataclasses.replace(budgets, disk_bytes=disk)


def _lacking(error: DoesNotFit | UsageError) -> float:
    """The smallest device budget that would fit; infinite where no budget does."""
    return error.least_bytes["device"] if isinstance(error, DoesNotFit) else math.inf


def _sizes(problem: ActivationProblem) -> tuple[int, ...]:
    """Numbers of layers of a problem's runs, in the order of the layers."""
    runs = [chunk for stage in range(problem.pipeline.stages) for chunk in chunk_layers(problem, stage)]
    return tuple(len(run) for run in sorted(runs, key=lambda run: run.start))


def _lines(found: list[_Candidate], left_out: int) -> Iterator[str]:
    rows = []
    for candidate in found[:10]:
        exchanged = communication(candidate.plan.problem)
        rows.append(
            (
                candidate.placement.describe(),
                ", ".join(map(str, _sizes(candidate.plan.problem))),
                format_duration(candidate.plan.step_s),
                format_duration(exchanged.tensor_s),
                format_duration(exchanged.data_s),
                format_duration(exchanged.pipeline_s),
            )
        )
    header = ("placement", "layers of the stages", "step", "collectives: tp, cp", "dp", "messages: pp")
    yield table(header, rows)
    if left_out:
        yield f"{left_out} further placements were not planned"


def _summary(candidate: _Candidate) -> dict[str, Any]:
    exchanged = communication(candidate.plan.problem)
    names = [group.name for group in candidate.placement.cluster.groups]
    return {
        "crossing": str(candidate.placement.crossing),
        "stages": [
            [
                {"group": names[group], "replicas": count}
                for group, count in zip(place.groups, place.replicas, strict=True)
            ]
            for place in candidate.placement.places
        ],
        "stage_layers": list(_sizes(candidate.plan.problem)),
        "step_s": candidate.plan.step_s,
        "communication_s": dataclasses.asdict(exchanged),
    }
