"""Data of the page of a search, ready for `memo.trace.render_page`: the answer, and a drawing of each layout that it shows.

Owns what the answer lacks and a drawing needs: each stage's memory by use, and the simulated step as spans. A page stays
small whatever the number of microbatches: spans that are too short to see are joined to their neighbours, with the shares
of what they were, and only within one pass of one microbatch.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from memo.cli.planning.drawn_nodes import groups_of, nodes_of
from memo.cli.tables.activation import memory_summary, use_name
from memo.events import Lane, StallCause
from memo.mip.activation import MemoryUse, stage_memory

if TYPE_CHECKING:
    from memo.mip.activation import StageView
    from memo.mip.simulate import Simulation, StageSimulation
    from memo.search import Candidate, Planned, Space

MOST_SPANS = 40_000
"""Most spans of all timelines of a page; number one's is always there."""
FRACTIONS = (0.0, *(1 / (1 << power) for power in (16, 14, 12, 11, 10, 9)), 1.0)
"""Fractions of a step below which spans are joined, tried one after the other."""
UNITS = 1_000_000
"""Parts of a step in which times are written."""
_WORK, _RECOMPUTE, _STALL, _NETWORK = range(4)


def search_page(
    answer: Mapping[str, Any], shown: Sequence[tuple[Planned, Simulation]], *, space: Space, written: Candidate
) -> dict[str, Any]:
    """Builds the data of the page.

    Args:
        answer: object of `memo plan --search --json`.
        shown: the best layouts, the one that memo train runs behind them if it is not among them; each with
            what was played of its step.
        space: what was searched.
        written: the layout whose plan -o writes; by its number in the page, where it is shown.
    """
    drawn = [_drawing(planned, simulation, space) for planned, simulation in shown]
    room = MOST_SPANS
    of_written = next((number for number, (planned, _) in enumerate(shown) if planned.candidate == written), None)
    order = sorted(range(len(shown)), key=lambda number: (number not in (0, of_written), number))
    for place, number in enumerate(order):
        timelines = _timelines(*shown[number], most=max(room // 2, room // (len(order) - place)))
        count = sum(len(one["spans"]) for one in timelines)
        if count > room and place:
            continue
        room -= count
        for stage, timeline in zip(drawn[number]["stages"], timelines, strict=True):
            stage |= timeline
    return {
        "search": dict(answer),
        "uses": {str(use): use_name(use) for use in MemoryUse},
        "written": of_written,
        "drawn": drawn,
    }


# One layout.


def _drawing(planned: Planned, simulation: Simulation, space: Space) -> dict[str, Any]:
    problem, layers = planned.plan.problem, planned.plan.layers
    return {
        "simulated_step_s": simulation.step_s,
        "microbatches": problem.pipeline.microbatches,
        "groups": groups_of(planned, simulation, space),
        "nodes": nodes_of(planned.candidate, space),
        "stages": [
            {
                "layers": [[chunk[0], chunk[-1]] for chunk in view.chunks],
                "memory": memory_summary(problem, stage_memory(view, layers)),
                "seconds": _seconds(stage, simulation.step_s),
            }
            for view, stage in zip(problem.stages, simulation.stages, strict=True)
        ],
    }


def _seconds(stage: StageSimulation, step_s: float) -> dict[str, float]:
    """Seconds of a stage's step by what its compute stream does; they add up to the step."""
    phases = {"forward": 0.0, "backward": 0.0, "optimizer": 0.0}
    for span in stage.spans:
        if span.lane is Lane.COMPUTE:
            phases[span.phase] += span.seconds
    found = phases | {
        "recompute": stage.recompute_s,
        "stall": stage.stall_s,
        "communication": stage.communication_s,
    }
    return found | {"idle": max(step_s - sum(found.values()), 0.0)}


# The simulated step.


@dataclasses.dataclass(slots=True)
class _Drawn:
    """Neighbouring spans that are drawn as one."""

    turn: int
    start_s: float
    end_s: float
    parts: list[float]
    """Seconds of work, recompute, waits for copies, waits for collectives."""

    def takes(self, start_s: float, seconds: float, kind: int, *, least_s: float) -> bool:
        """Whether a span that follows in the same turn is joined to it."""
        if start_s - self.end_s > least_s:
            return False
        alike = not any(part for other, part in enumerate(self.parts) if other != kind)
        return alike or min(seconds, self.end_s - self.start_s) < least_s

    def row(self, unit_s: float) -> list[int]:
        """Start, end and turn, then thousandths of recompute, stalls and collectives as far as there are any."""
        whole = max(sum(self.parts), unit_s * 1e-9)
        shares = [round(1000 * part / whole) for part in self.parts[_RECOMPUTE:]]
        while shares and not shares[-1]:
            shares.pop()
        return [round(self.start_s / unit_s), round(self.end_s / unit_s), self.turn, *shares]


_Item = tuple[float, float, int, int]
"""Start, end, kind and turn."""


def _timelines(planned: Planned, simulation: Simulation, *, most: int) -> list[dict[str, Any]]:
    """Passes and spans of each stage, joined until they are at most so many, or a pass is one span."""
    problem, unit_s = planned.plan.problem, simulation.step_s / UNITS
    stages = [_items(*pair) for pair in zip(problem.stages, simulation.stages, strict=True)]
    for fraction in FRACTIONS:
        joined = [_joined(items, fraction * simulation.step_s, unit_s) for _, items in stages]
        if sum(map(len, joined)) <= most:
            break
    return [
        {"turns": turns, "spans": [one.row(unit_s) for one in spans]}
        for (turns, _), spans in zip(stages, joined, strict=True)
    ]


def _joined(items: Sequence[_Item], least_s: float, unit_s: float) -> list[_Drawn]:
    found: list[_Drawn] = []
    for start_s, end_s, kind, turn in items:
        last = found[-1] if found and found[-1].turn == turn else None
        seconds = end_s - start_s
        if last is None or not last.takes(start_s, seconds, kind, least_s=max(least_s, unit_s / 2)):
            last = _Drawn(turn, start_s, end_s, [0.0] * 4)
            found.append(last)
        last.end_s = end_s
        last.parts[kind] += seconds
    return found


def _items(view: StageView, stage: StageSimulation) -> tuple[list[str], list[_Item]]:
    """Names of a stage's passes in order, such as `F3` or `B3.1` (microbatch and chunk), and what its compute does."""
    chunks = {f"layers.{index}": chunk for chunk, own in enumerate(view.chunks) for index in own} | {
        "embedding": 0,
        "head": view.pipeline.chunks - 1,
    }
    events = [
        (span.start_s, span.end_s, _WORK if span.lane is Lane.COMPUTE else _RECOMPUTE, span.phase, span.module)
        for span in stage.spans
        if span.lane is not Lane.NETWORK
    ] + [
        (wait.start_s, wait.end_s, _NETWORK if wait.cause is StallCause.COLLECTIVE else _STALL, "", "")
        for wait in stage.waits
    ]
    items: list[_Item] = []
    phases: list[str] = []
    seen: set[tuple[int, str]] = set()
    now: tuple[str, int] | None = None
    for start_s, end_s, kind, phase, module in sorted(events):
        if phase:
            key = phase, chunks.get(module, 0)
            if key != now or (kind, module) in seen:
                now, seen = key, set()
                phases.append(phase)
            seen.add((kind, module))
        items.append((start_s, end_s, kind, max(len(phases) - 1, 0)))
    return _names(view, phases), items


def _names(view: StageView, phases: Sequence[str]) -> list[str]:
    """Names of passes; without microbatches where they are not those of the schedule."""
    wanted = list(_schedule(view))
    first = [{"forward": "F", "backward": "B", "optimizer": "O"}[phase] for phase in phases]
    passes = [letter for letter in first if letter != "O"]
    if len(wanted) != len(passes):
        return first
    return [*wanted, *first[len(passes) :]]


def _schedule(view: StageView) -> Iterator[str]:
    pipeline, number = view.pipeline, view.number
    if pipeline.chunks > 1:
        yield from (f"{turn.kind}{turn.microbatch}.{turn.chunk}" for turn in pipeline.turns(number))
        return
    counts = {kind: itertools.count() for kind in set(pipeline.order(number))}
    yield from (f"{kind}{next(counts[kind])}" for kind in pipeline.order(number))
