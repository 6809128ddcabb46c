"""`memo plan --search --cluster`: the layout with the shortest step on groups of nodes that are not alike.

Owns the order of work: a bound for each layout, then its plan by `memo plan --cluster`, the lowest bound first, until what
is left is proven slower than the layouts that were found. With M microbatches and t(s) the shortest work of one layer,
without collectives, on the machine of stage s, a step of n layers takes at least

    M n / sum_s 1 / t(s)        on the placement where that is least, however layers are divided
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

from memo.cli.planning.cluster_launch import cluster_launch
from memo.cli.planning.layouts import (
    reason_not_trained,
    refuse_others,
    space_of,
    trained_model_flags,
    without_layout,
)
from memo.cli.planning.on_cluster import MOST_PLACEMENTS, ClusterPlan, ClusterRequest
from memo.cli.tables.address import table
from memo.errors import Infeasible, UsageError
from memo.mip.activation import DoesNotFit
from memo.search import Candidate, Space
from memo.units import format_duration, format_tokens

__all__ = ["ClusterLayouts", "search_cluster"]

WANTED = 10
"""Best layouts that are found and proven."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ClusterLayouts:
    """Result of a search on a cluster."""

    best: tuple[tuple[Candidate, ClusterPlan], ...]
    """The best candidate of each of the best layouts, in ascending order of the step."""
    asked: ClusterRequest
    """The request of the first one."""
    planned: int
    """Numbers of candidates: planned; proven slower by their bound; not to fit; without a place on the groups of nodes."""
    slower: int
    unfit: int
    without_place: int

    @property
    def lines(self) -> tuple[str, ...]:
        """The best layouts and what was proven, as text."""
        header = ("layout", "pp", "dp", "cp", "tp", "schedule", "microbatch", "step", "placement")
        rows = [
            (
                str(number),
                *one.shape.columns,
                _schedule_words(one),
                f"{one.setting.batch} x {one.setting.accumulate}",
                format_duration(found.plan.step_s),
                found.placement.describe(),
            )
            for number, (one, found) in enumerate(self.best, 1)
        ]
        every = self.planned + self.slower + self.unfit + self.without_place
        proof = (
            f"{every:,} ways to run the step: {self.planned:,} planned, {self.slower:,} proven slower by their work, "
            f"{self.unfit:,} do not fit, {self.without_place:,} have no place on the groups of nodes"
        )
        return (table(header, rows), proof)

    def launch(self, args: argparse.Namespace) -> tuple[str, ...] | str:
        """Commands that run the first one, for each run of nodes; or the reason why there are none."""
        reason = reason_not_trained(args, self.asked.request)
        if reason is None and args.zero not in (None, 3):
            reason = "memo train shards by ZeRO 3 alone"
        if reason is not None:
            return reason
        candidate, found = self.best[0]
        lines = cluster_launch(
            found, candidate, model_flags=trained_model_flags(args), plan_file=args.output or "plan.json"
        )
        return (
            lines or "a node would hold ranks that do not follow one another; give --tp, --cp and --pp of whole nodes"
        )

    @property
    def summary(self) -> dict[str, Any]:
        """The same for --json."""
        proof = {name: getattr(self, name) for name in ("planned", "slower", "unfit", "without_place")}
        return {"best": [_summary(one, found) for one, found in self.best], "proof": proof}


def search_cluster(
    args: argparse.Namespace, *, wanted: int = WANTED, say: Callable[[str], None] = lambda text: None
) -> ClusterLayouts:
    """Finds the layouts with the shortest steps on the cluster of the flags, and proves that no other is faster.

    Raises:
        UsageError: a flag does not go with the search, or no layout divides the model and the step.
        Infeasible: no layout fits.
    """
    cluster_request, space = _cluster_space(args)
    zero = 3 if args.zero is None else args.zero
    bounds: list[tuple[float, Candidate, ClusterRequest]] = []
    without_place = unfit = 0
    for candidate in _candidates(space, zero):
        asked = _asked(cluster_request, space, candidate)
        try:
            bounds.append((_bound_s(asked), candidate, asked))
        except UsageError:
            without_place += 1
    bounds.sort(key=lambda one: (one[0], one[1].key))
    best: dict[tuple[object, ...], tuple[Candidate, ClusterPlan, ClusterRequest]] = {}
    limit_s, planned = math.inf, 0
    for number, (bound_s, candidate, asked) in enumerate(bounds):
        if bound_s > limit_s:
            slower = len(bounds) - number
            break
        say(f"searching layouts, {planned} planned, {len(bounds) - number:,} open, bound {bound_s:,.3g} s")
        try:
            found = asked.plan() if asked.may_fit() else None
        except (DoesNotFit, UsageError):
            found = None
        if found is None:
            unfit += 1
            continue
        planned += 1
        known = best.get(candidate.layout)
        if known is None or found.plan.step_s < known[1].plan.step_s:
            best[candidate.layout] = candidate, found, asked
        if len(best) >= wanted:
            limit_s = sorted(one.plan.step_s for _, one, _ in best.values())[wanted - 1]
    else:
        slower = 0
    if not best:
        tokens = format_tokens(space.request.layout.tokens)
        raise Infeasible(
            f"no layout of {space.request.model} at {tokens} tokens fits on the {cluster_request.cluster.gpus} GPUs of "
            f"{args.cluster}; give more --host or --nvme, or a shorter --seq"
        )
    ranked = sorted(best.values(), key=lambda one: (one[1].plan.step_s, one[0].key))[:wanted]
    return ClusterLayouts(
        best=tuple((candidate, found) for candidate, found, _ in ranked),
        asked=ranked[0][2],
        planned=planned,
        slower=slower,
        unfit=unfit,
        without_place=without_place,
    )


def _cluster_space(args: argparse.Namespace) -> tuple[ClusterRequest, Space]:
    """The cluster, and the layouts of up to all of its GPUs: as of equal nodes, of as many GPUs as divide every node."""
    for name in ("nodes", "gpus_per_node", "html", "former"):
        if getattr(args, name) is not None:
            flag = "from" if name == "former" else name.replace("_", "-")
            raise UsageError(f"--{flag} does not go with --search --cluster; leave it out")
    refuse_others(args)
    asked = ClusterRequest.of(without_layout(args))
    machines = [group.machine for group in asked.cluster.groups]
    each = math.gcd(*(machine.gpus_per_node for machine in machines))
    joined = max(machines, key=lambda machine: machine.network.nics_per_node).network
    if not joined.nics_per_node and asked.cluster.gpus > each:
        joined = dataclasses.replace(joined, nics_per_node=1)  # of the connections; placements know them
    machine = dataclasses.replace(machines[0], gpus_per_node=each, network=joined)
    request = dataclasses.replace(asked.request, machine=machine)
    return asked, space_of(args, request, nodes=asked.cluster.gpus // each)


def _candidates(space: Space, zero: int) -> Iterator[Candidate]:
    for shape in space.shapes:
        for setting in space.settings(shape):
            bare = (dataclasses.replace(one, zero=zero, stage_layers=()) for one in space.schedules(shape, setting))
            yield from dict.fromkeys(bare)  # each placement has its own numbers of layers


def _asked(cluster_request: ClusterRequest, space: Space, candidate: Candidate) -> ClusterRequest:
    """Request of `memo plan --cluster` with this layout."""
    request = dataclasses.replace(space.request_of(candidate), embedding=space.request.embedding)
    return dataclasses.replace(cluster_request, request=request, profiles={})


def _bound_s(asked: ClusterRequest) -> float:
    """Seconds that no plan of a layout is faster than.

    Raises:
        UsageError: the layout has no place on the cluster.
    """
    request = asked.request

    @functools.cache
    def layers_s(group: int) -> list[float]:
        """Work of each layer on a group's machine."""
        profile = request.profile_on(asked.cluster.groups[group].machine, request.layout, tiles=request.tiles[0])
        return [
            layer.forward_s + layer.backward_s - layer.forward_exchange_s - layer.backward_exchange_s
            for layer in profile.layer_profiles()
        ]

    steps = []
    for placement in itertools.islice(asked.cluster.placements(request.layout), MOST_PLACEMENTS):
        slowest = [max(min(layers_s(group)) for group in place.groups) for place in placement.places]
        steps.append(request.accumulate * len(layers_s(0)) / sum(1 / seconds for seconds in slowest))
    return min(steps)


def _schedule_words(candidate: Candidate) -> str:
    if candidate.shape.pp == 1:
        return "-"
    return str(candidate.schedule) + (f" of {candidate.chunks}" if candidate.chunks > 1 else "")


def _summary(candidate: Candidate, found: ClusterPlan) -> dict[str, Any]:
    return {
        **dataclasses.asdict(candidate.shape),
        "schedule": None if candidate.shape.pp == 1 else str(candidate.schedule),
        "chunks": candidate.chunks,
        "zero": candidate.zero,
        **dataclasses.asdict(candidate.setting),
        "step_s": found.plan.step_s,
        "placement": found.placement.describe(),
    }
