"""The cut is the cheapest of all choices, and the curve their convex hull, by trying every choice."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys
import time

import highspy
import pytest

from memo.swap.recompute.tape.cut import Cut, CutNode, CutProblem, Operation, cheapest, curve


def random_problem(seed: int, *, operations: int = 7, most: int = 12) -> CutProblem:
    """Small costs, so that ties are many; operations that make several contents, bans, and what cannot be kept."""
    draw = random.Random(seed)
    contents = [CutNode(keep=draw.choice((0, draw.randint(1, most))), made_by=None) for _ in range(draw.randint(1, 3))]
    made = []
    for number in range(operations):
        near = range(max(0, len(contents) - 8), len(contents))
        reads = tuple(draw.choice(near) for _ in range(draw.randint(0, 3)))
        banned = draw.random() < 0.15
        made.append(Operation(cost=None if banned else draw.randint(0, most), reads=reads))
        for _ in range(draw.choice((1, 1, 1, 2, 3))):
            lost = draw.random() < 0.2
            contents.append(CutNode(keep=None if lost else draw.randint(0, most), made_by=number))
    wanted = draw.sample(range(len(contents)), draw.randint(0, len(contents) // 2))
    return CutProblem(contents=contents, operations=made, wanted=wanted)


def every_cut(problem: CutProblem) -> list[Cut]:
    """Every choice of operations that leaves nothing to be kept that cannot be."""
    found = []
    runnable = [number for number, operation in enumerate(problem.operations) if operation.cost is not None]
    for size in range(len(runnable) + 1):
        for run in itertools.combinations(runnable, size):
            needed = set(problem.wanted).union(*(problem.operations[number].reads for number in run))
            kept = frozenset(content for content in needed if problem.contents[content].made_by not in run)
            bits = [problem.contents[content].keep for content in kept]
            costs = [problem.operations[number].cost for number in run]
            if None not in bits:
                found.append(Cut(kept=kept, replayed=frozenset(run), keep_cost=sum(bits), replay_cost=sum(costs)))
    return found


def hull(cuts: list[Cut]) -> list[tuple[int, int]]:
    """Corners of the lower left convex hull, by turning only to the left."""
    corners: list[tuple[int, int]] = []
    for bits, time_ in sorted({(cut.keep_cost, cut.replay_cost) for cut in cuts}):
        if corners and time_ >= min(corner[1] for corner in corners):
            continue
        while len(corners) > 1:
            (bits0, time0), (bits1, time1) = corners[-2:]
            if (bits1 - bits0) * (time_ - time0) > (time1 - time0) * (bits - bits0):
                break
            corners.pop()
        corners.append((bits, time_))
    return corners[::-1]


def least(cuts: list[Cut], bits_weight: int, time_weight: int) -> frozenset[int]:
    """What all cuts of least cost replay in common."""
    if bits_weight and time_weight:
        costs = [(bits_weight * cut.keep_cost + time_weight * cut.replay_cost,) for cut in cuts]
    else:
        costs = [(cut.keep_cost, cut.replay_cost)[:: 1 if bits_weight else -1] for cut in cuts]
    best = min(costs)
    return frozenset.intersection(*(cut.replayed for cut, cost in zip(cuts, costs, strict=True) if cost == best))


SOLVABLE = [problem for seed in range(500) if every_cut(problem := random_problem(seed))]


def test_random_problems_are_of_every_kind() -> None:
    assert 300 < len(SOLVABLE) < 500
    assert sum(len(hull(every_cut(problem))) > 3 for problem in SOLVABLE) > 30


@pytest.mark.parametrize("weights", [(1, 0), (0, 1), (1, 1), (3, 1), (1, 4), (2, 3), (10**15, 10**14 + 1)])
def test_no_choice_is_cheaper_and_none_of_equal_cost_replays_less(weights: tuple[int, int]) -> None:
    for problem in SOLVABLE:
        cuts = every_cut(problem)
        found = cheapest(problem, *weights)
        assert found in cuts
        assert found.replayed == least(cuts, *weights)


def test_the_curve_is_the_convex_hull() -> None:
    for problem in SOLVABLE:
        cuts = every_cut(problem)
        corners = curve(problem)
        assert all(corner in cuts for corner in corners)
        assert [(corner.keep_cost, corner.replay_cost) for corner in corners] == hull(cuts)


def test_each_corner_replays_more_than_the_one_before() -> None:
    for problem in SOLVABLE:
        corners = curve(problem)
        assert corners[0] == cheapest(problem, 0, 1)
        assert corners[-1] == cheapest(problem, 1, 0)
        for left, right in itertools.pairwise(corners):
            assert left.replayed < right.replayed


def test_what_can_neither_be_kept_nor_replayed_is_refused() -> None:
    refused = 0
    for seed in range(500):
        problem = random_problem(seed)
        if not every_cut(problem):
            refused += 1
            with pytest.raises(ValueError, match="needed, and can be neither kept nor recomputed"):
                cheapest(problem, 1, 1)
            with pytest.raises(ValueError, match="needed, and can be neither kept nor recomputed"):
                curve(problem)
    assert refused > 10


def by_linear_program(problem: CutProblem, bits_weight: int, time_weight: int) -> float:
    """The cost of the cheapest cut, by a solver of linear programs: each corner of this one is integer."""
    model = highspy.Highs()
    model.silent()
    run = [model.addVariable(0, int(o.cost is not None), (o.cost or 0) * time_weight) for o in problem.operations]
    kept = [model.addVariable(0, int(c.keep is not None), (c.keep or 0) * bits_weight) for c in problem.contents]
    needed = [model.addVariable(int(number in problem.wanted), 1) for number in range(len(problem.contents))]
    for content, need, keep in zip(problem.contents, needed, kept, strict=True):
        model.addConstr(need <= (keep if content.made_by is None else keep + run[content.made_by]))
    for number, operation in enumerate(problem.operations):
        for read in operation.reads:
            model.addConstr(run[number] <= needed[read])
    model.run()
    assert model.getModelStatus() == highspy.HighsModelStatus.kOptimal
    return float(model.getInfo().objective_function_value)


@pytest.mark.parametrize("seed", range(6))
def test_a_large_problem_costs_what_a_linear_program_finds(seed: int) -> None:
    candidates = (random_problem(1000 * seed + at, operations=300, most=500) for at in itertools.count())
    problem = next(problem for problem in candidates if corners_of(problem) > 5)
    for weights in ((1, 1), (5, 1), (1, 7)):
        found = cheapest(problem, *weights)
        cost = weights[0] * found.keep_cost + weights[1] * found.replay_cost
        assert cost == pytest.approx(by_linear_program(problem, *weights), abs=1e-3)


def corners_of(problem: CutProblem) -> int:
    try:
        return len(curve(problem))
    except ValueError:
        return 0


def shuffled(problem: CutProblem, draw: random.Random) -> tuple[CutProblem, list[int]]:
    """The same problem with its contents numbered otherwise, and the old number of each."""
    old = list(range(len(problem.contents)))
    draw.shuffle(old)
    new = {number: at for at, number in enumerate(old)}
    operations = [
        Operation(cost=o.cost, reads=tuple(draw.sample([new[read] for read in o.reads], len(o.reads))))
        for o in problem.operations
    ]
    wanted = draw.sample([new[number] for number in problem.wanted], len(problem.wanted))
    return CutProblem(contents=[problem.contents[number] for number in old], operations=operations, wanted=wanted), old


def test_the_order_of_contents_changes_nothing() -> None:
    draw = random.Random(0)
    for problem in SOLVABLE[:150]:
        other, old = shuffled(problem, draw)
        for corner, same in zip(curve(problem), curve(other), strict=True):
            assert same.replayed == corner.replayed
            assert {old[number] for number in same.kept} == corner.kept


def chain(*costs: tuple[int, int]) -> CutProblem:
    """A content that is there, and a row of operations of one content each; the last is wanted. (bits, picoseconds)."""
    contents = [CutNode(keep=0, made_by=None)] + [CutNode(keep=keep, made_by=n) for n, (keep, _) in enumerate(costs)]
    operations = [Operation(cost=cost, reads=(number,)) for number, (_, cost) in enumerate(costs)]
    return CutProblem(contents=contents, operations=operations, wanted=[len(costs)])


def test_of_equal_bits_the_content_nearest_to_backward_is_kept() -> None:
    problem = chain((5, 1), (5, 1), (8, 1), (8, 1))
    problem.operations[0] = Operation(cost=None, reads=(0,))  # type: ignore[index]
    assert cheapest(problem, 1, 0) == Cut(kept=frozenset({2}), replayed=frozenset({2, 3}), keep_cost=5, replay_cost=2)


def test_the_curve_of_a_chain() -> None:
    """Replaying the last operation saves 6 bits a picosecond, the first two 1 each; the middle lies above that line."""
    points = [(cut.keep_cost, cut.replay_cost) for cut in curve(chain((3, 3), (4, 2), (10, 1)))]
    assert points == [(10, 0), (4, 1), (0, 6)]


def test_an_operation_of_two_results_is_paid_once() -> None:
    """Either result alone is not worth a replay, both together are."""
    contents = [CutNode(keep=0, made_by=None), CutNode(keep=6, made_by=0), CutNode(keep=6, made_by=0)]
    for wanted, replayed in (([1], set()), ([2], set()), ([1, 2], {0})):
        problem = CutProblem(contents=contents, operations=[Operation(cost=10, reads=(0,))], wanted=wanted)
        assert cheapest(problem, 1, 1).replayed == replayed


def test_a_content_of_two_readers_is_kept_once() -> None:
    contents = [CutNode(keep=7, made_by=None), CutNode(keep=5, made_by=0), CutNode(keep=5, made_by=1)]
    operations = [Operation(cost=0, reads=(0,)), Operation(cost=0, reads=(0, 0))]
    problem = CutProblem(contents=contents, operations=operations, wanted=[1, 2])
    assert cheapest(problem, 1, 1) == Cut(kept=frozenset({0}), replayed=frozenset({0, 1}), keep_cost=7, replay_cost=0)


def test_nothing_wanted_costs_nothing() -> None:
    problem = CutProblem(contents=[CutNode(keep=1, made_by=None)], operations=[], wanted=[])
    assert curve(problem) == (Cut(kept=frozenset(), replayed=frozenset(), keep_cost=0, replay_cost=0),)


@pytest.mark.parametrize(
    ("contents", "operations", "wanted", "message"),
    [
        ([CutNode(keep=-1, made_by=None)], [], [], "content 0: keeping it costs -1 bits"),
        ([CutNode(keep=1, made_by=0)], [], [], "content 0: there is no operation 0"),
        ([], [Operation(cost=-1, reads=())], [], "operation 0: replaying it costs -1 ps"),
        ([], [Operation(cost=1, reads=(0,))], [], "operation 0: there is no content 0"),
        ([CutNode(keep=1, made_by=0)], [Operation(cost=1, reads=(0,))], [], "which operation 0 writes only then"),
        ([], [], [0], "there is no content 0 that could be wanted"),
    ],
)
def test_a_problem_without_meaning_is_refused(
    contents: list[CutNode], operations: list[Operation], wanted: list[int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        CutProblem(contents=contents, operations=operations, wanted=wanted)


@pytest.mark.parametrize("weights", [(0, 0), (-1, 1), (1, -1)])
def test_weights_without_a_minimum_are_refused(weights: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="weights of bits and time"):
        cheapest(chain((1, 1)), *weights)


def test_a_long_chain_takes_no_longer_than_its_length() -> None:
    """Augmenting shortest paths alone would take the square of it, 3 seconds here; so it is some 0.3."""
    problem = chain(*((20000 - 10 * n - n * n % 7, n % 7) for n in range(2000)))
    begin = time.process_time()
    corners = curve(problem)
    assert time.process_time() - begin < 2
    assert len(corners) == 2


def test_the_cut_needs_no_torch() -> None:
    code = "import sys, memo.swap.recompute.tape.cut; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd="/")
