"""Space of a search on groups of nodes that are not alike: every candidate on every placement of its shape.

Owns what a placement changes: the problem of a candidate, whose stages have machines of their own; numbers of layers by
each stage's speed and memory, tried beside equal ones; hybrid sharding within each group of nodes; and a bound by work. With
M microbatches, and t(s) the shortest work of one layer on the machine of stage s, e(s) that of the embedding and the head
there, without collectives, a step of n layers takes at least

    M (n + sum_s e(s) / t(s)) / sum_s 1 / t(s)        on the placement where that is least, however layers are divided
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from memo.errors import UsageError
from memo.mip.activation import Budgets
from memo.mip.cluster import Cluster, Crossing, Placement, ProfileOf, StagePlace, balanced_layers
from memo.search.bounds import Bound, BoundSequence
from memo.search.candidates import Candidate
from memo.search.space import Space

if TYPE_CHECKING:
    from memo.mip.activation import ActivationProblem
    from memo.mip.cluster import NodeGroup
    from memo.mip.inputs import EmbeddingOrHeadProfile, Hardware, LayerProfile, Profile
    from memo.search.candidates import Setting, Shape
    from memo.search.request import Request

__all__ = ["MOST_PLACEMENTS", "ClusterSpace"]

MOST_PLACEMENTS = 256
"""Most placements of a shape that are searched, in the order of `Cluster.placements`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClusterSpace(Space):
    """Candidates for a step on a cluster.

    Shapes are enumerated as on equal nodes, by the machine and the nodes of the request: these have a number of GPUs that
    divides every node of the cluster.
    """

    cluster: Cluster
    budgets: Mapping[str, Budgets]
    """Budgets of a node, by the name of its group."""
    _known: dict[Shape, tuple[tuple[StagePlace, ...], ...]] = dataclasses.field(default_factory=dict, compare=False)
    """Placements of shapes that were asked for."""

    @property
    def machines(self) -> tuple[Hardware, ...]:
        """The machines of its groups of nodes."""
        return tuple(group.machine for group in self.cluster.groups)

    def placement(self, candidate: Candidate) -> Placement:
        """The placement of a candidate."""
        return Placement(cluster=self.cluster, places=candidate.places, tp=candidate.shape.tp, cp=candidate.shape.cp)

    def schedules(self, shape: Shape, setting: Setting) -> list[Candidate]:
        """A candidate of each schedule on each placement, with equal numbers of layers, in which nothing is sharded."""
        bare = super().schedules(shape, setting)
        return [dataclasses.replace(one, places=places) for one in bare for places in self._placements(shape)]

    def further(self, candidate: Candidate) -> list[Candidate]:
        """The candidate with layers divided by its stages' speed and memory; none where that fails or is equal."""
        if candidate.shape.pp == 1:
            return []
        try:
            layers = balanced_layers(
                self.placement(candidate),
                _profile_of(self.request_of(dataclasses.replace(candidate, zero=3)), self.request.tiles[0]),
                schedule=candidate.schedule,
                chunks=candidate.chunks,
                budgets_of=self._budgets_of,
            )
        except UsageError:
            return []
        other = dataclasses.replace(candidate, stage_layers=layers)
        return [] if self.owns(other) else [other]

    def owns(self, candidate: Candidate) -> bool:
        """Whether the candidate's numbers of layers are equal ones."""
        runs = len(candidate.stage_layers)
        share, more = divmod(sum(candidate.stage_layers), max(runs, 1))
        return candidate.stage_layers == tuple(share + (run < more) for run in range(runs))

    def count(self, shape: Shape, setting: Setting) -> int:
        """Number of candidates of a shape and a setting."""
        bare = super().schedules(shape, setting)
        if not bare:
            return 0
        placed = [dataclasses.replace(bare[0], places=places) for places in self._placements(shape)]
        return len(bare) * sum(len(self.shardings(one)) for one in placed)

    def problem(self, candidate: Candidate, tiles: int = 1) -> ActivationProblem:
        """The planning problem of a candidate on its placement.

        Raises:
            UsageError: the layout does not go with groups of nodes.
        """
        request = self.request_of(candidate)
        return self.placement(candidate).problem_inputs(
            _profile_of(request, tiles),
            microbatches=request.accumulate,
            layers=candidate.stage_layers or None,
            schedule=candidate.schedule,
            chunks=candidate.chunks,
            budgets_of=self._budgets_of,
        )

    def least_work(self, shape: Shape, setting: Setting) -> BoundSequence:
        """Bound by the work on the placement that suits it best."""
        request = self.request_of(Candidate(shape=shape, setting=setting, zero=0))

        @functools.cache
        def work(group: int) -> tuple[float, float, float, int]:
            """Seconds of a layer, of the embedding and of the head on a group's machine, and the number of layers."""
            profile = _profile_of(request, self.request.tiles[0])(self.cluster.groups[group].machine)
            layers = profile.layer_profiles()
            ends = _work_s(profile.embedding), _work_s(profile.head)
            return min(map(_work_s, layers)), *ends, len(layers)

        steps = []
        for places in self._placements(shape):
            layer_s = [max(work(group)[0] for group in place.groups) for place in places]
            ends = max(work(group)[1] for group in places[0].groups) / layer_s[0]
            ends += max(work(group)[2] for group in places[-1].groups) / layer_s[-1]
            count = work(places[0].groups[0])[3]
            steps.append(setting.accumulate * (count + ends) / sum(1 / seconds for seconds in layer_s))
        return BoundSequence(((Bound.COMPUTE, min(steps)),)) if steps else BoundSequence()

    def _placements(self, shape: Shape) -> tuple[tuple[StagePlace, ...], ...]:
        """Stages' places of a shape; none where it has no place on the groups of nodes."""
        if shape not in self._known:
            layout = dataclasses.replace(
                self.request.layout, gpus=shape.gpus, tp=shape.tp, cp=shape.cp, pp=shape.pp, ring=shape.ring
            )
            try:
                placed = list(itertools.islice(self.cluster.placements(layout), MOST_PLACEMENTS))
            except UsageError:
                placed = []
            across = shape.ep == 1  # experts are not planned on several groups
            self._known[shape] = tuple(one.places for one in placed if across or one.crossing is not Crossing.REPLICAS)
        return self._known[shape]

    def _divisions(self, shape: Shape, chunks: int) -> tuple[tuple[int, ...], ...]:
        """Equal numbers, the first ones one larger where they do not divide the layers."""
        return ((),)

    def _shardings(self, candidate: Candidate) -> list[tuple[int, int | None]]:
        """Kinds of sharding with their numbers of ranks, also within each group of nodes that has a part of the replicas."""
        found, shape = super()._shardings(candidate), candidate.shape
        if len(found) > 1 and self.fixed.get("zero") is None and candidate.places:
            placement = self.placement(candidate)
            within = math.gcd(*(replicas * shape.cp for replicas in placement.islands(0) or (0,)))
            if within > 1 and (3, within) not in found:
                found.append((3, within))
        return found

    def _budgets_of(self, group: NodeGroup) -> Budgets:
        return self.budgets[group.name]


def _profile_of(request: Request, tiles: int) -> ProfileOf:
    """Profiles of a request on a machine, with the changes of a placement."""

    @functools.lru_cache(maxsize=64)
    def profile_of(machine: Hardware, **changes: Any) -> Profile:
        return request.profile_on(machine, dataclasses.replace(request.layout, **changes), tiles=tiles)

    return profile_of


def _work_s(part: LayerProfile | EmbeddingOrHeadProfile) -> float:
    """Seconds of a microbatch's two passes, without waits for collectives."""
    return part.forward_s + part.backward_s - part.forward_exchange_s - part.backward_exchange_s
