"""Best-first search of a space: the candidates with the shortest steps, and bounds that prove all others slower.

Owns the order of work. Open are numbers of GPUs, then shapes with a setting, then candidates; the one with the lowest bound
is taken first and either divided, bounded more tightly, or planned. What is open when the lowest bound exceeds the steps
that were found is proven slower, or not to fit. A plan that is better than all others of its layout opens candidates beside
the space, with single layers on other stages, and so does a candidate that no plan fits.

Bounding and planning are done in rounds: of those with the lowest bounds several are bounded side by side, and several
planned, and the next round is chosen when all of them are done, so that the same space gives the same answer whatever the
number and the pace of the processes. Planning is the expensive part, so it comes last.
"""

from __future__ import annotations

import collections
import dataclasses
import heapq
import itertools
import math
import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TYPE_CHECKING

from memo.errors import SolverFailed
from memo.gpt import GPTConfig
from memo.mip.activation import find_plan
from memo.search.bounds import Bound, BoundSequence
from memo.search.candidates import Candidate
from memo.search.nodes import Node, NodeStage, moved, node_of, problem_of, refine, roomier
from memo.units import format_duration

if TYPE_CHECKING:
    from memo.mip.activation import ActivationPlan, ActivationProblem
    from memo.search.candidates import Setting, Shape
    from memo.search.space import Space

WANTED = 10
"""Best layouts that are found and proven."""
A_ROUND = 4
"""Candidates that are planned side by side."""
BOUNDED = 64
"""Parts of the space that are bounded side by side."""
NEAR = 1.02
"""Multiple of the lowest bound beyond which no part is bounded beside the one with it: it may never be needed."""
FEW = 20
"""Parts that are bounded before processes are started for the further ones."""
ROUNDING = 1e-9
"""Fraction by which two sums of the same seconds may differ."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Planned:
    """A candidate with its plan."""

    candidate: Candidate
    plan: ActivationPlan
    bound_s: float
    """The bound that it was planned by; below its step."""

    @property
    def step_s(self) -> float:
        """Predicted seconds of a step."""
        return self.plan.step_s


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """A part of the space that was never planned, with the bound that closed it."""

    shapes: tuple[Shape, ...]
    setting: Setting | None
    """None where it is all settings of the shapes."""
    schedule: Candidate | None
    """The candidate of one schedule in which nothing is sharded; None where it is all of the schedules."""
    candidate: Candidate | None
    """None where it is all shardings, or all candidates of the shapes and the setting."""
    count: int
    """Number of its candidates."""
    kind: Bound
    bound_s: float
    """No plan has a shorter step; infinite where none fits."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Result of a search."""

    space: Space
    best: tuple[Planned, ...]
    """The best candidate of each of the best layouts, in ascending order of the step: proven to be these."""
    runnable: Planned | None
    """The best one that runs as asked for, proven likewise; None where there is none."""
    planned: tuple[Planned, ...]
    """All that were planned, in ascending order."""
    without_plan: tuple[Candidate, ...]
    """Candidates for which the planner found that no plan fits."""
    closed: tuple[Closed, ...]
    moved: int = 0
    """Number of these that are beside the space: candidates with single layers on other stages."""

    @property
    def candidates(self) -> int:
        """Number of candidates in the space."""
        return len(self.planned) + len(self.without_plan) + sum(one.count for one in self.closed) - self.moved

    @property
    def pruned(self) -> dict[Bound, int]:
        """Numbers of candidates that were never planned, by the kind of the bound that closed them."""
        counts: collections.Counter[Bound] = collections.Counter()
        for one in self.closed:
            counts[one.kind] += one.count
        return {kind: counts[kind] for kind in Bound if counts[kind]}

    @property
    def smallest_bound_s(self) -> float | None:
        """The smallest bound of what was never planned; None where nothing is left that could fit."""
        return min((one.bound_s for one in self.closed if math.isfinite(one.bound_s)), default=None)


def search_layouts(
    space: Space,
    *,
    candidates: Sequence[Candidate] | None = None,
    wanted: int = WANTED,
    runs: Callable[[Candidate], bool] | None = None,
    workers: int = 1,
    say: Callable[[str], None] | None = None,
) -> Found:
    """Finds the candidates with the shortest steps and proves that no other is faster, by the planner's cost model.

    Args:
        space: what is searched.
        candidates: those to search, with what is beside them; None: all of the space.
        wanted: number of best layouts.
        runs: whether a candidate can be carried out; the best of these is found and proven, too.
        workers: processes that plan, beside this one where more than 1.
        say: called with a few words of progress.

    Raises:
        SolverFailed: a solver crashed, or a process that planned ended.
    """
    search = _Search(space, wanted=wanted, runs=runs, workers=workers, say=say)
    return search.run(candidates)


class _Search:
    """State of one search."""

    def __init__(
        self,
        space: Space,
        *,
        wanted: int,
        runs: Callable[[Candidate], bool] | None,
        workers: int,
        say: Callable[[str], None] | None,
    ) -> None:
        self._space, self._wanted, self._workers = space, wanted, workers
        self._runs = runs or (lambda candidate: True)
        self._say = say or (lambda text: None)
        self._open: list[tuple[float, int, Node]] = []
        self._numbers = itertools.count()
        self._planned: list[Planned] = []
        self._without_plan: list[Candidate] = []
        self._closed: list[Node] = []
        self._pool: ProcessPoolExecutor | None = None
        self._bounded = 0
        self._known: set[Candidate] = set()  # those that were opened beside the space
        self._progress_s = 0.0
        self._started: Future[None] | None = None
        self._best_s: dict[tuple[object, ...], float] = {}  # by layout
        self._worst_s = math.inf  # of the best layouts that are wanted
        self._runnable_s = math.inf

    def run(self, candidates: Sequence[Candidate] | None) -> Found:
        """Searches until the lowest bound of what is open is above what was found."""
        if candidates is None:
            self._begin()
        for candidate in candidates or ():
            self._known.add(candidate)
            self._push(node_of(candidate, moved=False))
        try:
            while self._open:
                round_ = self._round()
                if not round_:
                    break
                self._plan(round_)
        except BrokenProcessPool:
            raise SolverFailed("a process of the search ended; the machine may be out of memory") from None
        finally:
            if self._pool is not None:
                self._pool.shutdown(cancel_futures=True)
        return self._found()

    # What is open.

    def _push(self, node: Node) -> None:
        if math.isinf(node.ladder.seconds):
            self._closed.append(node)
            return
        if node.moved and node.stage is NodeStage.CANDIDATE:
            assert node.candidate is not None
            if node.candidate in self._known:
                return
            self._known.add(node.candidate)
        heapq.heappush(self._open, (node.ladder.seconds, next(self._numbers), node))

    def _begin(self) -> None:
        space = self._space
        rate = self._highest_flops()
        tokens = space.global_batch * space.request.layout.tokens
        for gpus, shapes in itertools.groupby(space.shapes, key=lambda shape: shape.gpus):
            least_s = 0.0 if rate is None else rate[0] * tokens / (gpus * rate[1])
            self._push(
                Node(stage=NodeStage.GPUS, ladder=BoundSequence(((Bound.COMPUTE, least_s),)), shapes=tuple(shapes))
            )

    def _highest_flops(self) -> tuple[float, float] | None:
        """FLOPs of a token, and FLOP/s that no GPU exceeds; None for an empty space."""
        space = self._space
        own = isinstance(space.request.config, GPTConfig)
        rates = [machine.most_flops_per_s if own else machine.peak_flops for _, _, machine, _ in space.groups]
        for shape in space.shapes:
            for setting in space.settings(shape):
                profile = space.request_of(Candidate(shape=shape, setting=setting)).problem().profile
                return profile.model_flops_causal_per_token, max(rates)
        return None

    def _cutoff_s(self, node: Node) -> float:
        """Seconds above which a node is closed, since the answer has something better in its place."""
        one = node.candidate or node.schedule
        own_s = self._worst_s if one is None else min(self._worst_s, self._best_s.get(one.layout, math.inf))
        if node.candidate is not None and not self._runs(node.candidate):
            return own_s
        return max(own_s, self._runnable_s)

    def _keep(self, planned: Planned) -> None:
        """Adds a plan, updates what the answer would be now, and opens other divisions of the layers where it is better."""
        self._planned.append(planned)
        candidate, step_s = planned.candidate, planned.step_s
        better = step_s < self._best_s.get(candidate.layout, math.inf)
        self._best_s[candidate.layout] = min(step_s, self._best_s.get(candidate.layout, math.inf))
        if len(self._best_s) >= self._wanted:
            self._worst_s = sorted(self._best_s.values())[self._wanted - 1]
        if self._runs(candidate):
            better = better or step_s < self._runnable_s
            self._runnable_s = min(step_s, self._runnable_s)
        if better and candidate.shape.pp > 1 and self._is_needed(step_s):
            for node in moved(self._space, planned.plan, candidate):
                self._push(node)

    def _round(self) -> list[Node]:
        """The next nodes to plan, each of another layout; of one layout the others wait for the first one's plan."""
        chosen: dict[tuple[object, ...], Node] = {}
        waiting = []
        for node in self._to_plan():
            assert node.candidate is not None
            if chosen.setdefault(node.candidate.layout, node) is not node:
                waiting.append(node)
            elif len(chosen) == A_ROUND:
                break
        for node in waiting:
            self._push(node)
        return list(chosen.values())

    def _to_plan(self) -> Iterator[Node]:
        """Nodes to plan, by ascending bounds, all others on the way divided or bounded more tightly."""
        while self._open and self._is_needed(self._open[0][0]):
            node = self._open[0][-1]
            if self._is_useless(node):
                self._closed.append(node)
                heapq.heappop(self._open)
            elif node.stage >= NodeStage.FITS:
                heapq.heappop(self._open)
                yield node
            else:
                self._refine(self._to_refine())

    def _to_refine(self) -> list[Node]:
        """Takes the node with the lowest bound, and the next ones near it that are to be divided or bounded, too."""
        bound_s, _, node = heapq.heappop(self._open)
        found = [node]
        while self._open and len(found) < BOUNDED:
            next_s, _, node = self._open[0]
            if next_s > NEAR * bound_s or not self._is_needed(next_s) or node.stage >= NodeStage.FITS:
                break
            if sum(one.stage is NodeStage.TILED for one in found) == A_ROUND:
                break  # their bounds take as long as plans
            heapq.heappop(self._open)
            (self._closed if self._is_useless(node) else found).append(node)
        return found

    def _is_needed(self, bound_s: float) -> bool:
        """Whether the answer may lack something with this bound."""
        return bound_s * (1 - ROUNDING) <= max(self._worst_s, self._runnable_s)

    def _is_useless(self, node: Node) -> bool:
        """Whether the answer has something better in a node's place; of other divisions, or something as good."""
        return node.ladder.seconds * (1 - ROUNDING) > self._cutoff_s(node) * (1 - 2 * ROUNDING * node.moved)

    def _refine(self, nodes: Sequence[Node]) -> None:
        """Divides these nodes, or bounds them more tightly."""
        self._say(self._progress(nodes[0].ladder.seconds))
        self._bounded += len(nodes)
        if not self._has_processes():
            parts = [refine(self._space, node) for node in nodes]
        else:
            parts = list(self._processes().map(_refined, nodes, chunksize=-(-len(nodes) // (4 * self._workers))))
        for part in itertools.chain.from_iterable(parts):
            self._push(part)

    def _has_processes(self) -> bool:
        """Whether processes are there to share the work; they start while this one goes on."""
        if self._workers > 1 and self._bounded > FEW and self._started is None:
            self._started = self._processes().submit(_answer)
        return self._started is not None and self._started.done()

    def _processes(self) -> ProcessPoolExecutor:
        """Processes that work beside this one."""
        if self._pool is None:
            self._pool = ProcessPoolExecutor(
                self._workers,
                mp_context=multiprocessing.get_context("spawn"),
                initializer=_begin_process,
                initargs=(self._space,),
            )
        return self._pool

    # Planning.

    def _plan(self, nodes: Sequence[Node]) -> None:
        """Plans a round of candidates."""
        self._say(self._progress(nodes[0].ladder.seconds))
        tasks = []
        for node in nodes:
            assert node.candidate is not None
            limit_s = self._cutoff_s(node)
            problems = [
                (problem, bound_s)
                for number, bound_s in node.tiles
                if (problem := problem_of(self._space, node.candidate, number)) is not None
            ]
            tasks.append((tuple(problems), limit_s))
        for node, (plan, rest_s) in zip(nodes, self._plans(nodes, tasks), strict=True):
            assert node.candidate is not None
            if plan is not None:
                self._keep(Planned(candidate=node.candidate, plan=plan, bound_s=node.ladder.seconds))
            elif math.isfinite(rest_s):
                node.ladder = node.ladder.raised((Bound.BUDGET, rest_s))
                self._closed.append(node)
            else:
                self._without_plan.append(node.candidate)
                for other in roomier(self._space, node.candidate) if not node.moved else ():
                    self._push(other)

    def _plans(self, nodes: Sequence[Node], tasks: Sequence[_Task]) -> list[tuple[ActivationPlan | None, float]]:
        if self._workers == 1 or all(node.stage is NodeStage.FITS for node in nodes) or len(tasks) == 1:
            return [_best_plan(task) for task in tasks]
        return list(self._processes().map(_best_plan, tasks))

    def _progress(self, bound_s: float) -> str:
        best = min(self._best_s.values(), default=None)
        found = "" if best is None else f"best step {format_duration(best)}, "
        self._progress_s = max(bound_s, self._progress_s)  # other divisions are open without a bound at first
        counts = f"{len(self._planned)} planned, {len(self._open):,} open"
        return f"searching layouts, {counts}, {found}bound {format_duration(self._progress_s)}"

    # Answer.

    def _found(self) -> Found:
        planned = sorted(self._planned, key=lambda one: (one.step_s, one.candidate.key))
        of_layouts: dict[tuple[object, ...], Planned] = {}
        for one in planned:
            of_layouts.setdefault(one.candidate.layout, one)
        best = tuple(itertools.islice(of_layouts.values(), self._wanted))
        runnable = next((one for one in planned if self._runs(one.candidate)), None)
        nodes = [*self._closed, *(node for _, _, node in self._open)]
        return Found(
            space=self._space,
            best=best,
            runnable=runnable,
            planned=tuple(planned),
            without_plan=tuple(self._without_plan),
            closed=tuple(self._closed_node(node) for node in nodes),
            moved=len(self._known)
            + sum(self._closed_node(node).count for node in nodes if node.moved and node.candidate is None),
        )

    def _closed_node(self, node: Node) -> Closed:
        count = 1
        if node.candidate is None and node.schedule is not None:
            count = len(self._space.shardings(node.schedule))
        elif node.candidate is None:
            settings = [node.setting] if node.setting is not None else None
            count = sum(
                self._space.count(shape, setting)
                for shape in node.shapes
                for setting in (settings or self._space.settings(shape))
            )
        return Closed(
            shapes=tuple(node.shapes),
            setting=node.setting,
            schedule=node.schedule,
            candidate=node.candidate,
            count=count,
            kind=node.ladder.kind(self._cutoff_s(node)),
            bound_s=node.ladder.seconds,
        )


_spaces: list[Space] = []
"""The space that a process of a search works on."""


def _begin_process(space: Space) -> None:
    """Takes the space, and leaves Ctrl-C to the process that waits for this one."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _spaces.append(space)


def _answer() -> None:
    """Shows that a process is there."""


def _refined(node: Node) -> list[Node]:
    return refine(_spaces[0], node)


_Task = tuple[tuple[tuple["ActivationProblem", float], ...], float]
"""Problems of one candidate with their bounds, ascending, and the step above which a plan is of no use."""


def _best_plan(task: _Task) -> tuple[ActivationPlan | None, float]:
    """The plan with the shortest step among a candidate's numbers of MLP tiles; None where none fits, or is of use.

    Returns:
        The plan, and the lowest bound of the numbers that were not tried.
    """
    problems, limit_s = task
    best: ActivationPlan | None = None
    for problem, bound_s in problems:
        if bound_s > (limit_s if best is None else min(best.step_s, limit_s)):
            return best, bound_s
        plan = find_plan(problem)
        if plan is not None and (best is None or plan.step_s < best.step_s):
            best = plan
    return best, math.inf
