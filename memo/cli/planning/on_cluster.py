"""`memo plan --cluster`: a layout on groups of nodes that are not alike, each of its placements planned.

Owns the choice: of every placement with equal stages and with stages of their group's speed, the one with the shortest
predicted step; where none fits, with fewer layers on the fullest stages. From there single layers move between stages as
long as that makes the step shorter.
"""

from __future__ import annotations

import argparse
import contextlib
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
    find_plan,
    layers_of_runs,
    predict_stages,
    solve_mlp_tiles,
)
from memo.mip.cluster import Cluster, NodeGroup, Placement, ProfileOf, balanced_layers, communication, read_cluster
from memo.search import MOST_PLACEMENTS, roomier_layers
from memo.units import format_duration

if TYPE_CHECKING:
    from memo.mip.inputs import Hardware, Profile
    from memo.search import Request

__all__ = ["ClusterPlan", "ClusterRequest"]

MOST_ROWS = 10
MOST_MOVES = 32
"""Layers that are moved between stages of the best one."""
LEAST_SAVING = 1e-9
"""Fraction of a step; smaller savings are errors of rounding."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Candidate:
    """A placement with numbers of layers."""

    placement: Placement
    layers: tuple[int, ...] | None
    """None: equal ones."""
    problem: ActivationProblem
    """With the fewest MLP tiles."""
    kept_s: float
    """The step if everything could be kept, which no plan is shorter than."""
    plan: ActivationPlan | None = None
    """None where it was not planned, since the best step is shorter than `kept_s`."""

    @property
    def step_s(self) -> float:
        """The predicted step, or its bound."""
        return self.kept_s if self.plan is None else self.plan.step_s


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
    """Budgets by the name of the group: those of the flags, or their parts of the group's own memories."""
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
            "--plot": args.plot is not None,
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
        looked_at, refused, left_out = self._candidates()
        found: list[_Candidate] = []
        best: _Candidate | None = None
        for candidate in sorted(looked_at, key=lambda candidate: candidate.kept_s):
            if best is not None and candidate.kept_s >= best.step_s:
                found.append(candidate)
                continue
            try:
                of_tiles = self._problems(candidate.placement, candidate.layers)
                candidate = dataclasses.replace(candidate, plan=solve_mlp_tiles(of_tiles, self.request.tiles))
            except DoesNotFit as error:
                refused.append(error)
                continue
            found.append(candidate)
            best = candidate if best is None or candidate.step_s < best.step_s else best
        best = best or self._roomier(looked_at)
        if best is None:
            raise min(refused, key=_lacking)
        moved = best if self.request.stage_layers else self._moved(best)
        chosen = self._with_rows(moved)
        found = sorted([*(one for one in found if one is not moved), chosen], key=lambda candidate: candidate.step_s)
        assert chosen.plan is not None
        return ClusterPlan(
            plan=chosen.plan,
            placement=chosen.placement,
            lines=tuple(_lines(found, left_out)),
            summary={"placements": [_summary(candidate) for candidate in found], "placements_left_out": left_out},
        )

    def _candidates(self) -> tuple[list[_Candidate], list[DoesNotFit | UsageError], bool]:
        """Placements with numbers of layers; errors of those that cannot be; and whether there are more placements."""
        found: list[_Candidate] = []
        refused: list[DoesNotFit | UsageError] = []
        placements = self.cluster.placements(self.request.layout)
        for placement in itertools.islice(placements, MOST_PLACEMENTS):
            try:
                found += [self._candidate(placement, layers) for layers in self._divisions(placement)]
            except UsageError as error:
                refused.append(error)
        return found, refused, next(placements, None) is not None

    def _candidate(self, placement: Placement, layers: tuple[int, ...] | None) -> _Candidate:
        problem = self._problems(placement, layers)(self.request.tiles[0])
        return _Candidate(placement=placement, layers=layers, problem=problem, kept_s=_kept_s(problem))

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
        if sizes != layers_of_runs(self._problems(placement, None)(self.request.tiles[0])):
            yield sizes

    def _roomier(self, candidates: list[_Candidate]) -> _Candidate | None:
        """The best of candidates that do not fit with fewer layers on their fullest stages; None where none fits so."""
        found: list[_Candidate] = []
        for candidate in candidates if not self.request.stage_layers else ():
            fullest = self._problems(candidate.placement, candidate.layers)(self.request.tiles[-1])
            layers = roomier_layers(
                fullest,
                lambda layers, at=candidate.placement: self._problems(at, layers)(self.request.tiles[-1]),  # type: ignore[misc]
            )
            if layers is None:
                continue
            other = self._candidate(candidate.placement, layers)
            with contextlib.suppress(DoesNotFit):
                plan = solve_mlp_tiles(self._problems(other.placement, layers), self.request.tiles)
                found.append(dataclasses.replace(other, plan=plan))
        return min(found, key=lambda one: one.step_s, default=None)

    def _moved(self, best: _Candidate) -> _Candidate:
        """The candidate after moves of single layers from the slowest stage to others, while they shorten the step."""
        for _ in range(MOST_MOVES if best.problem.pipeline.stages > 1 else 0):
            shorter = self._shorter_neighbour(best)
            if shorter is None:
                break
            best = shorter
        return best

    def _shorter_neighbour(self, best: _Candidate) -> _Candidate | None:
        """A candidate with one layer of the slowest stage on another one; of those with a shorter step the likeliest."""
        assert best.plan is not None
        stages, sizes, pipeline = best.plan.stages, layers_of_runs(best.problem), best.problem.pipeline
        givers = pipeline.chunk_positions(max(range(len(stages)), key=lambda stage: stages[stage].microbatch_s))
        moves = [
            {giver: sizes[giver] - 1, taker: sizes[taker] + 1}
            for giver in givers
            for taker in range(len(sizes))
            if taker not in givers and sizes[giver] > 1
        ]
        limit_s, tiles = best.step_s * (1 - LEAST_SAVING), best.plan.problem.profile.mlp_tiles
        others = (tuple(move.get(run, size) for run, size in enumerate(sizes)) for move in moves)
        for other in sorted((self._candidate(best.placement, layers) for layers in others), key=lambda one: one.kept_s):
            if other.kept_s >= limit_s:
                break
            plan = find_plan(self._problems(best.placement, other.layers)(tiles))
            if plan is not None and plan.step_s < limit_s:
                return dataclasses.replace(other, plan=plan)
        return None

    def _with_rows(self, best: _Candidate) -> _Candidate:
        """The candidate with its embedding's gradient exchanged as rows, where that makes the step shorter."""
        assert best.plan is not None
        problem = best.plan.problem
        exchange = problem.profile.embedding_exchange
        asked = self.request.embedding
        if asked is not EmbeddingGradients.AUTO or exchange is None or exchange.sparse_s >= exchange.dense_s:
            return best
        request = dataclasses.replace(self.request, embedding=EmbeddingGradients.SPARSE)
        other = dataclasses.replace(self, request=request, profiles={})
        plan = find_plan(other._problems(best.placement, best.layers)(problem.profile.mlp_tiles))
        return best if plan is None or plan.step_s >= best.plan.step_s else dataclasses.replace(best, plan=plan)

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
    disk = budgets.disk_bytes if args.disk_budget != "0" else group.disk_bytes
    return dataclasses.replace(budgets, disk_bytes=disk)


def _lacking(error: DoesNotFit | UsageError) -> float:
    """The smallest device budget that would fit; infinite where no budget does."""
    return error.least_bytes["device"] if isinstance(error, DoesNotFit) else math.inf


def _kept_s(problem: ActivationProblem) -> float:
    """Predicted step with everything kept, whatever the memory."""
    layers = (LayerPlan(),) * len(problem.profile.layers)
    return ActivationPlan(problem=problem, layers=layers, stages=predict_stages(problem, layers)).step_s


def _lines(found: list[_Candidate], left_out: bool) -> Iterator[str]:
    rows = []
    for candidate in found[:MOST_ROWS]:
        exchanged = communication(candidate.problem)
        step = format_duration(candidate.step_s)
        rows.append(
            (
                candidate.placement.describe(),
                ", ".join(map(str, layers_of_runs(candidate.problem))),
                step if candidate.plan is not None else f"at least {step}",
                format_duration(exchanged.tensor_s),
                format_duration(exchanged.data_s),
                format_duration(exchanged.pipeline_s),
            )
        )
    header = ("placement", "layers of the stages", "step", "collectives: tp, cp", "dp", "messages: pp")
    shown = table(header, rows)
    if len(found) > MOST_ROWS:
        shown += f"\nand {len(found) - MOST_ROWS} others, which are slower"
    if left_out:
        shown += f"\nmore than {MOST_PLACEMENTS} placements: the further ones were not looked at"
    yield shown


def _summary(candidate: _Candidate) -> dict[str, Any]:
    exchanged = communication(candidate.problem)
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
        "stage_layers": list(layers_of_runs(candidate.problem)),
        "planned": candidate.plan is not None,
        "step_s": candidate.step_s,
        "communication_s": dataclasses.asdict(exchanged),
    }
