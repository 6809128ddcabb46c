"""Explains a recorded call: each step of its tape with what becomes of its results and why, and the points of its curve.

Reads the choice that the call left; decides nothing. The explanation is data of its own
(explanation.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from memo.swap.levels import Level
from memo.swap.recompute.explanation import Fate, LayerExplanation, Point, Row
from memo.swap.recompute.tape.cut import curve
from memo.swap.recompute.tape.log import Origin
from memo.swap.recompute.tape.plan import keep_bits
from memo.swap.recompute.tape.tape import uses_in

if TYPE_CHECKING:
    from memo.swap.layers import Layer
    from memo.swap.levels import Setting
    from memo.swap.recompute.choice import Choice
    from memo.swap.recompute.tape.cut import Cut
    from memo.swap.recompute.tape.tape import TapeStep

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
_US_PER_PS = 1e-6


def explain(layer: Layer, choice: Choice, setting: Setting, *, refused: str | None, is_whole: bool) -> LayerExplanation:
    """Explains one call.

    Args:
        layer: whose call it was.
        choice: what the call left to choose.
        setting: of its recompute.
        refused: why all of it moves; None if it need not.
        is_whole: no plan of it could be used, so all of it moved.
    """
    free = choice.for_next
    used = choice.at(Level.SAVE_ALL) if is_whole else choice.cut(setting)
    level = setting if isinstance(setting, Level) else Level.SAVE_ATTENTION
    return LayerExplanation(
        layer=layer.name,
        module=type(layer.module).__name__,
        setting="; ".join(filter(None, (str(setting), str(choice.bans)))),
        refused=refused,
        saved_storages=len(choice.wanted) + len(choice.stuck),
        saved_nbytes=choice.saved_nbytes,
        rows=tuple(_Rows(choice, choice.banned(level), used).all()),
        points=tuple(_points(choice, used, best=None if is_whole else free.cut(setting))),
    )


class _Rows:
    """Writes the rows of a tape of which whole storages are kept or replayed."""

    def __init__(self, choice: Choice, reasons: Mapping[int, str], used: Cut) -> None:
        tape, sources = choice.tape, choice.sources
        self._tape, self._sources, self._reasons = tape, sources, reasons
        self._kept, self._replayed = used.kept, used.replayed
        self._wanted = {tape.last[storage] for storage in choice.wanted}
        self._stuck = {tape.last[storage] for storage in choice.stuck}
        self._keep = [keep_bits(tape, number, sources) for number in range(len(tape.contents))]
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
        return Row(
            step=None,
            operator=_FROM[birth],
            shape=tuple(size),
            dtype=_name(dtype),
            nbytes=nbytes,
            is_saved=content in self._saved_contents,
            fate=fate,
            kept_nbytes=self._kept_nbytes(content),
            why="it was there before the layer" if fate is Fate.MOVED else "",
            replay_us=None,
        )

    def _step(self, step: TapeStep) -> Row:
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
            replay_us=tape.costs[step.number] * _US_PER_PS if made else None,
        )

    def _kept_nbytes(self, content: int) -> int:
        return (self._keep[content] or 0) // 8 if self._fate(content) is Fate.MOVED else 0

    def _fate(self, content: int) -> Fate:
        writer, storage = self._tape.contents[content].writer, self._tape.contents[content].storage
        if content in self._kept:
            return Fate.STAYS if storage in self._sources.free else Fate.MOVED
        if writer in self._replayed:
            return Fate.REPLAYED
        return Fate.STAYS if content in self._saved_contents else Fate.UNUSED

    def _why(self, step: TapeStep, content: int, fate: Fate) -> str:
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
        if content in self._stuck:
            return "it is the layer's result"
        if number in self._reasons:
            return self._reasons[number]
        return "keeping it is cheapest" if self._runs[number] else "what it is made of is not kept"


def _points(choice: Choice, used: Cut, *, best: Cut | None) -> list[Point]:
    """Points of the curve; `best` is the cut that would be chosen if all that the layer makes could be kept."""
    free, saved = choice.for_next, choice.saved_nbytes
    named = {each.point: free.at(each) for each in Level}
    cuts: list[tuple[str, Cut]] = list(named.items())
    others = [cut for cut in curve(free.problem(Level.SAVE_ATTENTION)) if cut not in named.values()]
    cuts += [(f"p{number}", cut) for number, cut in enumerate(others, 1)]
    if used not in [cut for _, cut in cuts]:
        cuts.append((_BETWEEN if used == best else _NOW, used))
    at = next((name for name, cut in cuts if cut == used), None)
    points = [
        Point(
            name=name,
            kept_nbytes=cut.keep_cost // 8,
            kept_fraction=cut.keep_cost / (8 * saved) if saved else 0.0,
            replay_us=cut.replay_cost * _US_PER_PS,
            replayed_steps=len(cut.replayed),
            held_nbytes=(choice if name == _NOW else free).plan(cut).held_bytes if cut.replayed else 0,
            is_used=name == at,
        )
        for name, cut in cuts
    ]
    return sorted(points, key=lambda point: (-point.kept_nbytes, point.replay_us))


def _name(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")
