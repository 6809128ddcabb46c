"""Explains a recorded call: each step of its tape with what becomes of its results and why, and the points of its curve.

Reads the tape, the cut that was chosen and the bans that it kept to; decides nothing. The explanation is data of its own
(explanation.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from memo.swap.recompute.explanation import Fate, LayerExplanation, Point, Row, TokenRange
from memo.swap.recompute.ranges.ranged_plan import RangedPlan
from memo.swap.recompute.tape.cut import Cut
from memo.swap.recompute.tape.log import Origin
from memo.swap.recompute.tape.plan import plan_of, problem_of
from memo.swap.recompute.tape.tape import uses_in
from memo.swap.token_levels import Level

if TYPE_CHECKING:
    from memo.swap.layers import Layer
    from memo.swap.recompute.ranges.ranged_plan import Span
    from memo.swap.recompute.tape.plan import Sources
    from memo.swap.recompute.tape.tape import Step, Tape

__all__ = ["NAMED_POINTS", "explain"]

NAMED_POINTS = {"matmuls": Level.SAVE_MATMULS, "attention": Level.SAVE_ATTENTION, "input": Level.SAVE_INPUT}
"""Points of every layer's curve; besides them the first, `all`."""

_FROM = {
    Origin.INPUT: "hidden states",
    Origin.GIVEN: "argument",
    Origin.PARAMETER: "parameter",
    Origin.FOUND: "other tensor",
    Origin.MADE: "",
}
_NOW = "now"
"""Point of a call that could not keep what its plan would: the first one, before which nothing was known."""
_BETWEEN = "between"
"""Point between two corners of the curve, where more storages are kept than at the lower one."""
_RANGES = "ranges"
"""Point of a call of which ranges of tokens are replayed."""
_US_PER_PS = 1e-6


def explain(
    layer: Layer,
    *,
    setting: str,
    refused: str | None,
    tape: Tape,
    sources: Sources,
    wanted: Sequence[int],
    stuck: Sequence[int],
    reasons: Mapping[int, str],
    used: Cut | RangedPlan,
    best: Cut | None,
    named: Mapping[str, Cut],
    curve: Sequence[Cut],
) -> LayerExplanation:
    """Explains one call.

    Args:
        layer: whose call it was.
        setting: of its recompute, for people.
        refused: why all of it moves; None if it need not.
        tape: of the call.
        sources: what could be kept of it.
        wanted: storages that autograd saved and that a replay may give.
        stuck: storages that autograd saved and that move in any case.
        reasons: steps that are never repeated at this setting, and why.
        used: the cut that was chosen, or the ranges of tokens.
        best: the cut that would be chosen if all that the layer makes could be kept; None where that is not asked.
        named: the points that have names.
        curve: the corners of the curve.
    """
    saved = sum(tape.storages[storage][1] for storage in (*wanted, *stuck))
    common = (tape, sources, wanted, stuck, reasons)
    ranged = used if isinstance(used, RangedPlan) else None
    rows = _Rows(*common, used) if isinstance(used, Cut) else _RangedRows(*common, used)
    return LayerExplanation(
        layer=layer.name,
        module=type(layer.module).__name__,
        setting=setting,
        refused=refused,
        saved_storages=len(wanted) + len(stuck),
        saved_nbytes=saved,
        rows=tuple(rows.all()),
        points=tuple(_points(tape, sources, wanted, saved, used, best, named, curve)),
        tokens=None if ranged is None else ranged.rows.tokens,
        ranges=() if ranged is None else tuple(_ranges(ranged.spans)),
    )


def _ranges(spans: Iterable[Span]) -> Iterator[TokenRange]:
    """The ranges of tokens, in their order."""
    for span in sorted(spans, key=lambda span: span.first):
        yield TokenRange(
            first=span.first,
            stop=span.stop,
            pieces=len(span.pieces),
            replay_us=span.cut.replay_cost * (span.stop - span.first) / span.rows.tokens * _US_PER_PS,
            held_nbytes=span.held_bytes,
        )


class _Rows:
    """Writes the rows of a tape of which whole storages are kept or replayed."""

    def __init__(
        self,
        tape: Tape,
        sources: Sources,
        wanted: Iterable[int],
        stuck: Iterable[int],
        reasons: Mapping[int, str],
        used: Cut | None,
    ) -> None:
        self._tape, self._sources, self._reasons = tape, sources, reasons
        self._kept: frozenset[int] = frozenset() if used is None else used.kept
        self._replayed: frozenset[int] = frozenset() if used is None else used.replayed
        self._wanted = {tape.last[storage] for storage in wanted}
        self._stuck = {tape.last[storage] for storage in stuck}
        problem = problem_of(tape, reasons, sources, wanted, stuck, tape.costs)
        self._keep = [content.keep for content in problem.contents]
        self._runs: list[bool] = []  # for each step, whether it could be repeated
        for step in tape.steps:
            self._runs.append(step.number not in reasons and all(self._can_have(read) for read in step.reads))
        self._saved_contents = {  # and whose graph is there: nothing is kept for one that has gone
            use.content
            for use in tape.saved
            if use.content in self._wanted | self._stuck or tape.contents[use.content].storage in sources.free
        }

    def _can_have(self, content: int) -> bool:
        writer = self._tape.contents[content].writer
        return self._keep[content] is not None or (writer >= 0 and self._runs[writer])

    def all(self) -> list[Row]:
        """Rows of what was there before and is saved or kept, then of all steps."""
        tape, order = self._tape, list(_FROM)
        there = [
            content
            for content in sorted(self._kept | self._saved_contents)
            if tape.contents[content].writer < 0 and tape.storage(content)[1]
        ]
        there.sort(key=lambda content: (order.index(tape.storage(content)[0]), content in self._saved_contents))
        return [*map(self._found, there), *map(self._step, self._tape.steps)]

    def _found(self, content: int) -> Row:
        tape = self._tape
        storage = tape.contents[content].storage
        birth, nbytes, *_ = tape.storages[storage]
        _, _, size, _, dtype = next(geometry for geometry in tape.values if geometry[0] == storage)
        fate = self._fate(content)
        kept = self._kept_nbytes(content)
        return Row(
            step=None,
            operator=_FROM[birth],
            shape=tuple(size),
            dtype=_name(dtype),
            nbytes=nbytes,
            is_saved=content in self._saved_contents,
            fate=fate,
            kept_nbytes=kept,
            why="it was there before the layer" if fate is Fate.MOVED else "",
            replay_us=None,
            kept_tokens=self._kept_tokens([content]),
        )

    def _step(self, step: Step) -> Row:
        tape = self._tape
        results = uses_in(step.out)
        made = set(step.makes)
        # a step that returns nothing of its own shows what it writes into
        shown = next((use for use in results if use.content in made), results[0] if results else None)
        size, dtype = ((), "") if shown is None else (tape.geometry(shown.value)[2], tape.geometry(shown.value)[4])
        content = min(made, key=lambda content: list(Fate).index(self._fate(content)), default=None)
        fate = Fate.VIEW if content is None else self._fate(content)
        return Row(
            step=step.number,
            operator=step.name,
            shape=tuple(size),
            dtype=_name(dtype),
            nbytes=sum(tape.storage(content)[1] for content in made),
            is_saved=bool(made & self._saved_contents),
            fate=fate,
            kept_nbytes=sum(map(self._kept_nbytes, made)),
            why="" if content is None else self._why(step, content, fate),
            replay_us=self._replay_share(step.number) * tape.costs[step.number] * _US_PER_PS if made else None,
            kept_tokens=self._kept_tokens(made),
            replayed_tokens=self._replayed_tokens(step.number),
        )

    def _kept_nbytes(self, content: int) -> int:
        return (self._keep[content] or 0) // 8 if self._fate(content) is Fate.MOVED else 0

    def _kept_tokens(self, contents: Iterable[int]) -> tuple[int, int] | None:
        return None

    def _replayed_tokens(self, step: int) -> tuple[int, int] | None:
        return None

    def _replay_share(self, step: int) -> float:
        return 1.0

    def _fate(self, content: int) -> Fate:
        writer, storage = self._tape.contents[content].writer, self._tape.contents[content].storage
        if content in self._kept:
            return Fate.STAYS if storage in self._sources.free else Fate.MOVED
        if writer in self._replayed:
            return Fate.REPLAYED
        return Fate.STAYS if content in self._saved_contents else Fate.UNUSED

    def _why(self, step: Step, content: int, fate: Fate) -> str:
        number = step.number
        if fate is Fate.UNUSED:
            return ""
        if fate is Fate.STAYS:
            return "too small to move, or something else has it too"
        if fate is Fate.REPLAYED:
            if self._wanted & set(step.makes):
                return "backward needs it"
            reader = next(number for number in sorted(self._replayed) if content in self._tape.steps[number].reads)
            return f"step {reader} reads it"
        if fate is Fate.DIVIDED:
            return "backward needs it"
        if content in self._stuck:
            return "it is the layer's result"
        if number in self._reasons:
            return self._reasons[number]
        return "keeping it is cheapest" if self._runs[number] else "what it is made of is not kept"


class _RangedRows(_Rows):
    """Writes the rows of a tape of which ranges of tokens are kept or replayed."""

    def __init__(
        self,
        tape: Tape,
        sources: Sources,
        wanted: Iterable[int],
        stuck: Iterable[int],
        reasons: Mapping[int, str],
        used: RangedPlan,
    ) -> None:
        super().__init__(tape, sources, wanted, stuck, {**used.never, **reasons}, None)
        self._plan, self._division = used, used.rows
        self._again = frozenset(storage for plan in used.wholes for storage in plan.wanted)
        self._nbytes: dict[int, int] = dict(used.kept_nbytes)
        self._beside: dict[int, tuple[int, int]] = {}
        for span in used.spans:  # the last tokens first
            for content, _ in span.kept_nbytes():
                self._beside[content] = span.first, self._beside.get(content, (0, span.stop))[1]
        self._replayed = used.steps
        self._kept = frozenset(content for span in used.spans for content in span.cut.kept)
        self._kept |= self._nbytes.keys()

    def _fate(self, content: int) -> Fate:
        storage = self._tape.contents[content].storage
        is_last = content == self._tape.last[storage]
        if is_last and (storage in self._again or self._plan.heads.get(storage, (0, 1))[1] == 0):
            return Fate.REPLAYED
        if is_last and storage in self._plan.heads:
            return Fate.DIVIDED
        if content in self._nbytes:
            return Fate.MOVED
        return super()._fate(content)

    def _kept_nbytes(self, content: int) -> int:
        return self._nbytes.get(content, 0)

    def _kept_tokens(self, contents: Iterable[int]) -> tuple[int, int] | None:
        for content in contents:
            storage = self._tape.contents[content].storage
            if self._fate(content) is Fate.DIVIDED:
                return 0, self._plan.heads[storage][1]
            if content in self._beside and content in self._division.rows:
                return self._beside[content]
            if content in self._nbytes and content in self._division.rows:
                return 0, self._division.tokens
        return None

    def _replayed_tokens(self, step: int) -> tuple[int, int] | None:
        spans = [(span.first, span.stop) for span in self._plan.spans if step in span.plan.steps]
        if any(step in plan.steps for plan in self._plan.wholes):
            spans.append((0, self._division.tokens))
        return (min(spans)[0], max(stop for _, stop in spans)) if spans else None

    def _replay_share(self, step: int) -> float:
        """Share of the time for all tokens; more than 1 for a step that runs in ranges and for the keys besides."""
        spans = [span for span in self._plan.spans if step in span.plan.steps]
        whole = sum(step in plan.steps for plan in self._plan.wholes)
        if not spans and not whole:
            return 1.0
        return whole + sum(span.stop - span.first for span in spans) / self._division.tokens


def _points(
    tape: Tape,
    sources: Sources,
    wanted: Sequence[int],
    saved: int,
    used: Cut | RangedPlan,
    best: Cut | None,
    named: Mapping[str, Cut],
    curve: Sequence[Cut],
) -> list[Point]:
    ranged = used if isinstance(used, RangedPlan) else None
    cuts: list[tuple[str, Cut]] = list(named.items())
    others = [cut for cut in curve if cut not in named.values()]
    cuts += [(f"p{number}", cut) for number, cut in enumerate(others, 1)]
    if not isinstance(used, RangedPlan) and used not in [cut for _, cut in cuts]:
        cuts.append((_BETWEEN if used == best else _NOW, used))
    free = dataclasses.replace(sources, everything=True)
    at = next((name for name, cut in cuts if cut == used), None)
    points = [
        Point(
            name=name,
            kept_nbytes=cut.keep_cost // 8,
            kept_fraction=cut.keep_cost / (8 * saved) if saved else 0.0,
            replay_us=cut.replay_cost * _US_PER_PS,
            replayed_steps=len(cut.replayed),
            held_nbytes=_held_nbytes(tape, cut, sources if name == _NOW else free, wanted),
            is_used=name == at,
        )
        for name, cut in cuts
    ]
    if ranged is not None:
        points.append(
            Point(
                name=_RANGES,
                kept_nbytes=ranged.nbytes,
                kept_fraction=ranged.nbytes / saved if saved else 0.0,
                replay_us=ranged.cost * _US_PER_PS,
                replayed_steps=len(ranged.steps),
                held_nbytes=ranged.held_bytes,
                is_used=True,
            )
        )
    return sorted(points, key=lambda point: (-point.kept_nbytes, point.replay_us))


def _held_nbytes(tape: Tape, cut: Cut, sources: Sources, wanted: Sequence[int]) -> int:
    return plan_of(tape, cut, sources, wanted).held_bytes if cut.replayed else 0


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
