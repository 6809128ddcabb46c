"""Parts of a space that are open in a search: how each is divided, or bounded more tightly.

Owns what one step of a search does to one part, knowing nothing of the others; the search decides which comes next.

    GPUs ──▶ shape and setting ──▶ schedule ──▶ candidate ──▶ everything kept ──▶ number of tiles ──▶ planned
             work bounds           schedule     kept bounds   fits: planned       budget bound
                                                    ▲         does not fit             ╎ a layer on another stage
                                                    └╌╌╌╌╌╌╌╌╌╌╌╌╌╌┴╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌╌┘
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import enum
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from memo.errors import UsageError
from memo.search.bounds import Bound, BoundSequence, budget_bound, has_room, keeps_all, kept_bounds, schedule_bounds
from memo.search.candidates import Candidate
from memo.search.divisions import moved_layers, roomier_layers

if TYPE_CHECKING:
    from memo.mip.activation import ActivationPlan, ActivationProblem
    from memo.search.candidates import Setting, Shape
    from memo.search.space import Space


class NodeStage(enum.IntEnum):
    """Progress of an open node: the division or the bound that comes last."""

    GPUS = 0
    SETTING = 1
    SCHEDULE = 2
    BARE = 3
    """Bounded by its schedule, under any sharding."""
    CANDIDATE = 4
    KEPT = 5
    """Bounded by keeping everything."""
    TILED = 6
    """Bounded for each number of tiles."""
    FITS = 7
    """Everything fits, so that this bound is its plan's step."""
    RELAXED = 8
    """Bounded by the budgets."""


@dataclasses.dataclass(slots=True, kw_only=True)
class Node:
    """A part of the space that is open."""

    stage: NodeStage
    ladder: BoundSequence
    shapes: Sequence[Shape]
    setting: Setting | None = None
    schedule: Candidate | None = None
    """The candidate of a schedule in which nothing is sharded; it stands for all shardings until `candidate` is given."""
    candidate: Candidate | None = None
    tiles: tuple[tuple[int, float], ...] = ()
    """Numbers of MLP tiles that may fit, with a bound on the step of each."""
    moved: bool = False
    """Whether it is a candidate beside those of the space: with single layers on other stages."""


def refine(space: Space, node: Node) -> list[Node]:
    """Divides a node, or bounds it more tightly."""
    match node.stage:
        case NodeStage.GPUS:
            return [
                _setting(space, node, shape, setting)
                for shape in node.shapes
                for setting in space.settings(shape)
                if space.count(shape, setting)
            ]
        case NodeStage.SETTING:
            assert node.setting is not None
            bare = space.schedules(node.shapes[0], node.setting)
            sharded = [other for one in bare for other in space.further(dataclasses.replace(one, zero=3))]
            further = [(dataclasses.replace(other, zero=0), True) for other in sharded]
            return [
                dataclasses.replace(node, stage=NodeStage.SCHEDULE, schedule=one, moved=beside)
                for one, beside in ([(one, False) for one in bare] + further)
            ]
        case NodeStage.SCHEDULE:
            return [_bare(space, node)]
        case NodeStage.BARE:
            assert node.schedule is not None
            return [
                dataclasses.replace(node, stage=NodeStage.CANDIDATE, candidate=candidate)
                for candidate in space.shardings(node.schedule)
            ]
        case NodeStage.CANDIDATE:
            return _with_roomier(space, _kept(space, node))
        case NodeStage.KEPT:
            return _with_roomier(space, _tiled(space, node))
        case _:
            return _with_roomier(space, _relaxed(space, node))


def moved(space: Space, plan: ActivationPlan, candidate: Candidate) -> list[Node]:
    """The nodes of a planned candidate with one layer on another stage."""
    others = [dataclasses.replace(candidate, stage_layers=layers) for layers in moved_layers(plan)]
    return [node_of(other) for other in others if not space.owns(other)]


def roomier(space: Space, candidate: Candidate) -> list[Node]:
    """A candidate that no plan fits with fewer layers on its fullest stages, where that may help."""
    if candidate.shape.pp == 1:
        return []
    tiles = space.request.tiles[-1]

    def of_layers(layers: tuple[int, ...]) -> ActivationProblem | None:
        return problem_of(space, dataclasses.replace(candidate, stage_layers=layers), tiles)

    problem = problem_of(space, candidate, tiles)
    layers = None if problem is None else roomier_layers(problem, of_layers)
    other = None if layers is None else dataclasses.replace(candidate, stage_layers=layers)
    return [] if other is None or space.owns(other) else [node_of(other)]


def node_of(candidate: Candidate, *, moved: bool = True) -> Node:
    """The node of a candidate, beside the space or not, whose bounds are still to come."""
    return Node(
        stage=NodeStage.CANDIDATE,
        ladder=BoundSequence(((Bound.COMPUTE, 0.0),)),
        shapes=(candidate.shape,),
        setting=candidate.setting,
        candidate=candidate,
        moved=moved,
    )


def _with_roomier(space: Space, node: Node) -> list[Node]:
    """A node, and where nothing of it fits the same with other numbers of layers."""
    assert node.candidate is not None
    return [node, *(roomier(space, node.candidate) if math.isinf(node.ladder.seconds) and not node.moved else ())]


def _setting(space: Space, node: Node, shape: Shape, setting: Setting) -> Node:
    ladder = node.ladder.raised(*space.least_work(shape, setting).steps)
    return Node(stage=NodeStage.SETTING, ladder=ladder, shapes=(shape,), setting=setting)


def _bare(space: Space, node: Node) -> Node:
    """Bounded by its schedule."""
    assert node.schedule is not None
    problem = problem_of(space, node.schedule, space.request.tiles[0])
    ladder = node.ladder if problem is None else node.ladder.raised(*schedule_bounds(problem).steps)
    return dataclasses.replace(node, stage=NodeStage.BARE, ladder=ladder)


def _kept(space: Space, node: Node) -> Node:
    """Bounded by what every plan holds, and by the step that keeps everything.

    The step is that with the fewest tiles, since tiles only add work.
    """
    assert node.candidate is not None
    if not any(_may_fit(space, node.candidate, tiles) for tiles in reversed(space.request.leanest_tiles)):
        return _unfit(node)
    problem = problem_of(space, node.candidate, space.request.tiles[0])
    if problem is None:
        return _unfit(node)
    ladder, _ = kept_bounds(problem)
    return dataclasses.replace(node, stage=NodeStage.KEPT, ladder=node.ladder.raised(*ladder.steps))


def _tiled(space: Space, node: Node) -> Node:
    """Bounded by the step that keeps everything with each number of tiles; with the fewest where it fits."""
    candidate, numbers = node.candidate, space.request.tiles
    assert candidate is not None
    tiles: list[tuple[int, float]] = []
    fewest = 0
    if not _may_fit(space, candidate, numbers[0]):  # with the most it may, or the node would be closed
        fewest = bisect.bisect_left(numbers, True, lo=1, key=lambda number: _may_fit(space, candidate, number))
    for number in numbers[fewest:]:
        problem = problem_of(space, candidate, number)
        if problem is None:
            continue
        ladder, plan = kept_bounds(problem)
        tiles.append((number, ladder.seconds))
        if number == space.request.tiles[0] and keeps_all(plan):
            return dataclasses.replace(node, stage=NodeStage.FITS, tiles=tuple(tiles))
    if not tiles:
        return _unfit(node)
    tiles.sort(key=lambda pair: pair[1])
    raised = node.ladder.raised((Bound.BUBBLE, tiles[0][1]))
    return dataclasses.replace(node, stage=NodeStage.TILED, ladder=raised, tiles=tuple(tiles))


def _relaxed(space: Space, node: Node) -> Node:
    """Bounded by the planner's linear program, for the number of tiles with which that is least."""
    assert node.candidate is not None
    bounds, relaxed = dict(node.tiles), set[int]()
    while (tiles := min(bounds, key=bounds.__getitem__)) not in relaxed:
        relaxed.add(tiles)
        problem = problem_of(space, node.candidate, tiles)
        assert problem is not None
        bounds[tiles] = max(bounds[tiles], budget_bound(problem))
    known = tuple(sorted(bounds.items(), key=lambda pair: pair[1]))
    raised = node.ladder.raised((Bound.BUDGET if math.isfinite(known[0][1]) else Bound.MEMORY, known[0][1]))
    return dataclasses.replace(node, stage=NodeStage.RELAXED, ladder=raised, tiles=known)


def _unfit(node: Node) -> Node:
    return dataclasses.replace(node, ladder=node.ladder.raised((Bound.MEMORY, math.inf)))


def problem_of(space: Space, candidate: Candidate, tiles: int) -> ActivationProblem | None:
    """The candidate's problem; None where the host has no room for what is to be there in any case."""
    with contextlib.suppress(UsageError):
        return space.problem(candidate, tiles)
    return None


def _may_fit(space: Space, candidate: Candidate, tiles: int) -> bool:
    """Whether a candidate has room for what every plan of it holds."""
    problem = problem_of(space, candidate, tiles)
    return problem is not None and has_room(problem)
