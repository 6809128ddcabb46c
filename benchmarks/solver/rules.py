"""Rules that choose what is kept, moved and recomputed without a solver, each held to the same budgets by the checker.

LP                 memo's solver
greedy             by bytes freed a second lost: copies that compute hides are free, then the cheaper of link and recompute
uniform alpha      MEMO's two inequalities: one alpha for all layers but the last two, which are kept
SSDTrain           everything moved from the first layers on, as many as the link hides; the last ones are kept
all swap           everything moved but of the last layers, as few as the device must give up
all recompute      attention and inputs kept on the device in every layer, the rest computed again
checkpoint every n input kept and all computed again in every n-th layer, the n of the shortest step that fits

A rule chooses among its candidates by the cost model's time, as the LP does; what a choice takes is played afterwards.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Sequence

from memo.mip.activation.checker import check_plan
from memo.mip.activation.cost import predict_stages
from memo.mip.activation.plan import ActivationPlan, ActivationProblem, LayerPlan
from memo.mip.activation.simulator import simulate
from memo.mip.activation.solver import find_plan
from memo.mip.inputs.profile import ALL, ATTENTION, INPUT, MATMULS, LayerProfile

KEPT_LAST = 2
PARTS = 8
"""The bytes that a layer moves are divided into so many by the greedy rule."""
ROUNDING = 0.98
"""Share of a tier that a rule fills: storages are placed whole, in pages."""
LEAST_GAIN = 1e-9
"""Below it two times are one."""
KEEP = LayerPlan()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Outcome:
    """A valid plan of a rule."""

    plan: ActivationPlan

    @functools.cached_property
    def step_s(self) -> float:
        """Its simulated step, played when first asked for: no part of choosing it."""
        return simulate(self.plan).step_s


def plan_of(problem: ActivationProblem, layers: Sequence[LayerPlan]) -> ActivationPlan:
    """These layers' plan with its predictions."""
    return ActivationPlan(problem=problem, layers=tuple(layers), stages=predict_stages(problem, layers))


def best_of(problem: ActivationProblem, candidates: Iterator[Sequence[LayerPlan]]) -> Outcome | None:
    """The shortest predicted step among the candidates that the checker accepts; None where it accepts none."""
    found = None
    for layers in candidates:
        plan = plan_of(problem, layers)
        if check_plan(plan) is None and (found is None or plan.step_s < found.plan.step_s * (1 - LEAST_GAIN)):
            found = Outcome(plan=plan)
    return found


def placed(problem: ActivationProblem, layers: Sequence[LayerProfile], plans: Sequence[LayerPlan]) -> list[LayerPlan]:
    """Moved bytes to the host as far as it goes, layer after layer, then to the disk."""
    budgets = problem.budgets
    room = ROUNDING * budgets.host_bytes / budgets.ranks_per_node
    placed = []
    for layer, plan in zip(layers, plans, strict=True):
        moved = (1 - plan.kept) * plan.saved_bytes(layer)
        if not moved:
            placed.append(plan)
            continue
        in_host = min(1.0, room / moved) if budgets.disk_bytes else 1.0
        room = max(room - in_host * moved, 0.0)
        host = (1 - plan.kept) * in_host
        placed.append(dataclasses.replace(plan, host=host, disk=max(1 - plan.kept - host, 0.0)))
    return placed


def _layers(problem: ActivationProblem) -> list[LayerProfile]:
    return list(problem.profile.layer_profiles())


def _deepest(layer: LayerProfile) -> str:
    """The point of a layer with the fewest bytes that keeps what attention gave."""
    return [known.name for known in layer.points if known.name in (ALL, MATMULS, ATTENTION)][-1]


def _moved(point: str = ALL, share: float = 1.0) -> LayerPlan:
    return LayerPlan(point=point, kept=1 - share, host=share, disk=0.0)


def _link(problem: ActivationProblem) -> float:
    """Bytes a second out of the device, to the tier that takes most."""
    lanes = problem.machine_of(0).lanes
    return (
        lanes.d2h_bytes_per_s
        if problem.budgets.host_bytes
        else min(lanes.d2h_bytes_per_s, lanes.disk_write_bytes_per_s)
    )


def lp(problem: ActivationProblem) -> Outcome | None:
    """memo's solver."""
    plan = find_plan(problem)
    return None if plan is None else Outcome(plan=plan)


def all_swap(problem: ActivationProblem) -> Outcome | None:
    """Everything moved; the last layers kept as far as they fit."""
    layers = _layers(problem)

    def candidates() -> Iterator[list[LayerPlan]]:
        for kept in range(1, len(layers)):
            yield placed(problem, layers, [_moved()] * (len(layers) - kept) + [KEEP] * kept)

    return best_of(problem, candidates())


def all_recompute(problem: ActivationProblem) -> Outcome | None:
    """Attention and inputs kept, all else computed again, in every layer."""
    return best_of(problem, iter([[LayerPlan(point=_deepest(layer)) for layer in _layers(problem)]]))


def checkpoint_every(problem: ActivationProblem) -> Outcome | None:
    """Every n-th layer computed again whole from its kept input."""
    layers = _layers(problem)
    again = [LayerPlan(point=INPUT if layer.point(INPUT) else _deepest(layer)) for layer in layers]

    def candidates() -> Iterator[list[LayerPlan]]:
        for number in range(1, len(layers) + 1):
            yield [plan if index % number == 0 else KEEP for index, plan in enumerate(again)]

    return best_of(problem, candidates())


def uniform_alpha(problem: ActivationProblem) -> Outcome | None:
    """The largest alpha by MEMO's inequalities: copies within a layer's forward, bytes within the host's memory.

    So many layers, evenly spread, are saved whole.
    """
    layers, budgets = _layers(problem), problem.budgets
    first, point = layers[0], _deepest(layers[0])
    if point == ALL:
        return None
    least = LayerPlan(point=point).saved_bytes(first)
    other = LayerPlan().saved_bytes(first) - least
    by_link = (first.forward_s * _link(problem) - least) / other
    tiers = (budgets.host_bytes + budgets.disk_bytes) / budgets.ranks_per_node
    by_memory = (tiers / max(len(layers) - KEPT_LAST, 1) - least) / other
    alpha = max(0.0, min(1.0, by_link, by_memory))
    moved = [
        _moved(ALL if math.floor((number + 1) * alpha) > math.floor(number * alpha) else point)
        for number in range(len(layers))
    ]

    def candidates() -> Iterator[list[LayerPlan]]:
        for kept in (KEPT_LAST, 1):
            yield placed(problem, layers, moved[: len(layers) - kept] + [KEEP] * kept)

    return best_of(problem, candidates())


def ssdtrain(problem: ActivationProblem) -> Outcome | None:
    """Layers are moved until the link, over the forward's time, has no room for the next; from there on all is kept."""
    layers, rate = _layers(problem), _link(problem)
    forward_s = sum(layer.forward_s for layer in layers)
    before_bytes, before_s, count = 0.0, 0.0, 0
    for layer in layers:
        own = LayerPlan().saved_bytes(layer)
        window = 3 * forward_s - 2 * before_s
        if (before_bytes + 2 * own) / window > rate:
            break
        before_bytes, before_s, count = before_bytes + own, before_s + layer.forward_s, count + 1
    count = min(count, len(layers) - 1)
    plans = placed(problem, layers, [_moved()] * count + [KEEP] * (len(layers) - count))
    return best_of(problem, iter([plans]))


def greedy(problem: ActivationProblem) -> Outcome | None:
    """Frees bytes one part of a layer after the other, the cheapest a byte first, until the checker accepts."""
    layers = _layers(problem)
    steps = list(_greedy_steps(problem, layers))
    if not steps:
        return None

    def state(count: int) -> list[LayerPlan]:
        moves, at = [0] * len(layers), [ALL] * len(layers)
        for index, point in steps[:count]:
            if point is None:
                moves[index] += 1
            elif at[index] != ATTENTION:
                at[index] = point
        plans = [_moved(point, moved / PARTS) for point, moved in zip(at, moves, strict=True)]
        return placed(problem, layers, plans)

    def is_valid(count: int) -> bool:
        return best_of(problem, iter([state(count)])) is not None

    first = next((count for count in range(len(steps) + 1) if is_valid(count)), None)
    if first is None:
        return None
    coarse = best_of(problem, (state(count) for count in range(first, len(steps) + 1, PARTS)))
    fine = best_of(problem, (state(count) for count in range(first, min(first + PARTS, len(steps)) + 1)))
    return min((found for found in (coarse, fine) if found is not None), key=lambda found: found.plan.step_s)


def _greedy_steps(problem: ActivationProblem, layers: Sequence[LayerProfile]) -> Iterator[tuple[int, str | None]]:
    """(layer, point or None for a move) in the order of their price a byte; free moves first, from the first layer on."""
    lanes, budgets = problem.machine_of(0).lanes, problem.budgets
    rooms = [
        (ROUNDING * budgets.host_bytes / budgets.ranks_per_node, lanes.d2h_bytes_per_s),
        (ROUNDING * budgets.disk_bytes / budgets.ranks_per_node, lanes.disk_write_bytes_per_s),
    ]
    forward_s, copies_s = sum(layer.forward_s for layer in layers[:-1]), 0.0
    priced: list[tuple[float, int, str | None]] = []
    for index, layer in enumerate(layers[:-1]):
        part = LayerPlan().saved_bytes(layer) / PARTS
        for _ in range(PARTS):
            while rooms and rooms[0][0] < part:
                rooms.pop(0)
            if not rooms:
                break
            room, rate = rooms[0]
            rooms[0] = room - part, rate
            copies_s += part / rate
            priced.append((0.0 if copies_s <= forward_s else 1 / rate, index, None))
    for index, layer in enumerate(layers):
        before = layer.points[0]
        for known in layer.points[1:]:
            if known.name in (MATMULS, ATTENTION) and known.saved_bytes < before.saved_bytes:
                price = (known.recompute_s - before.recompute_s) / (before.saved_bytes - known.saved_bytes)
                priced.append((price, index, known.name))
                before = known
    priced.sort(key=lambda one: one[0])
    return ((index, point) for _, index, point in priced)


RULES: dict[str, Callable[[ActivationProblem], Outcome | None]] = {
    "LP": lp,
    "greedy": greedy,
    "uniform alpha": uniform_alpha,
    "SSDTrain": ssdtrain,
    "all swap": all_swap,
    "all recompute": all_recompute,
    "checkpoint every n": checkpoint_every,
}
