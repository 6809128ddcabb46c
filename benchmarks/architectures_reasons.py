"""Reasons of an architecture's bytes: what its layers keep whole, by operator, and why a layer has no ranges of tokens.

Reads `manager.explain` after a forward. Layers that keep the same for the same reasons are one entry with their count.
"""

from __future__ import annotations

import collections
import re
from typing import TYPE_CHECKING, Any

from memo.errors import UsageError
from memo.swap.recompute.explanation import Fate
from memo.swap.recompute.plans import MOST_OVER
from memo.swap.recompute.ranges.ranged_plan import RangedPlan, ranged_plan_of
from memo.swap.recompute.ranges.rows import readings_of
from memo.swap.token_levels import Level, TokenLevels

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memo.manager import Manager
    from memo.swap.layers import Layer
    from memo.swap.recompute.choice import Choice
    from memo.swap.recompute.explanation import LayerExplanation
    from memo.swap.recompute.tape.tape import Tape
    from memo.swap.token_levels import Setting

__all__ = ["MOST_REASONS", "reasons_of"]

_EXPERTS = re.compile("Expert|MoE")
"""In the name of a class: a part of a layer that routes tokens to experts."""
MADE_OF = "what it is made of is not kept"
"""The reason of `explain` that has another one behind it."""
MOST_REASONS = 8
"""Operators that an entry names, those with the most bytes."""


def reasons_of(manager: Manager) -> list[dict[str, Any]]:
    """Entries for JSON about the last forward of each managed layer, bytes as `nbytes`.

    Each has the class of its `layers` (how many there are); `whole`, why all of it moves, or `saved_nbytes`,
    `kept_nbytes`, `point` (name of the choice), `experts` (whether it routes tokens to experts) and `kept`: operator,
    reason, bytes and origin of what is kept of whole storages (`_kept`). At a setting that divides tokens `undivided`
    has what kept a layer from that (`_undivided`); a layer in ranges has `divided_nbytes` instead, of all tokens of the
    storages that are divided.
    """
    found: dict[str, dict[str, Any]] = {}
    for layer in manager.layers:
        entry = _entry(manager, layer)
        found.setdefault(repr(entry), {"layers": 0, **entry})["layers"] += 1
    return list(found.values())


def _entry(manager: Manager, layer: Layer) -> dict[str, Any]:
    try:
        told = manager.explain(layer.name)
    except UsageError as error:
        return {"module": type(layer.module).__name__, "whole": str(error).partition(" has no tape: ")[2] or str(error)}
    last = manager._tokenwise._plans.last(layer.name)  # its tape, of which the explanation says less
    if told.refused is not None or last is None:
        return {"module": told.module, "whole": told.refused}
    choice, setting, found = last
    level = setting if isinstance(setting, Level) else Level.SAVE_ATTENTION
    never = choice.banned(level)
    if isinstance(found, RangedPlan):
        never = {**found.never, **never}
    return {
        "module": told.module,
        "experts": any(_EXPERTS.search(type(part).__name__) for part in list(layer.module.modules())[1:]),
        "saved_nbytes": told.saved_nbytes,
        "kept_nbytes": told.used.kept_nbytes,
        "point": told.used.name,
        "kept": _kept(told, choice.tape, never),
        **({"divided_nbytes": found.divided_nbytes} if isinstance(found, RangedPlan) else _undivided(choice, setting)),
    }


def _kept(told: LayerExplanation, tape: Tape, never: Mapping[int, str]) -> list[list[Any]]:
    """Operator, reason, bytes and origin of what is kept for all tokens, the most bytes first.

    The origin is of what is made of something that is neither kept nor repeated: that operator, and its reason.
    """
    nbytes: collections.Counter[tuple[str, str, str]] = collections.Counter()
    for row in told.rows:
        if row.fate is Fate.MOVED and row.kept_nbytes:
            origin = _origin(tape, row.step, never) if row.step is not None and row.why == MADE_OF else ""
            nbytes[row.operator, row.why, origin] += row.kept_nbytes
    return [[operator, why, count, origin] for (operator, why, origin), count in nbytes.most_common(MOST_REASONS)]


def _origin(tape: Tape, number: int, never: Mapping[int, str]) -> str:
    """The nearest step before this one that is never repeated."""
    waiting, seen = collections.deque([number]), {number}
    while waiting:
        step = waiting.popleft()
        if step in never:
            return f"{tape.steps[step].name}: {never[step]}"
        before = {tape.contents[content].writer for content in tape.steps[step].reads} - seen - {-1}
        waiting.extend(sorted(before, reverse=True))
        seen |= before
    return ""


def _undivided(choice: Choice, levels: Setting) -> dict[str, Any]:
    """Reasons why a layer has no ranges of tokens at a setting that asks for them.

    why: `nothing` no storage could be divided; `bytes` ranges would keep more than whole storages, by the factor `ratio`;
    `trial` a part of the tokens gave other bits; mixes: operators that mix tokens, with the bytes that they make.
    """
    if not isinstance(levels, TokenLevels) or max(levels.all, levels.matmuls, levels.attention) >= 1:
        return {}
    choice = choice.for_next  # for which a call is planned
    least = {level: choice.at(level).keep_cost for level in (Level.SAVE_MATMULS, Level.SAVE_ATTENTION)}
    ratios: list[float] = []
    mixes: dict[str, int] = {}
    readings = choice.tape.readings  # None where calls with these operators were not divided before
    for rows in readings_of(choice.tape) if readings is None else readings:
        mixes = mixes or _mixes(choice.tape, rows.mixes)
        first, second = ends = levels.ends(rows.tokens)
        bits = first * 8 * choice.saved_nbytes + (second - first) * least[Level.SAVE_MATMULS]
        bits += (rows.tokens - second) * least[Level.SAVE_ATTENTION]
        of_call = choice.banned, choice.sources, choice.wanted, choice.stuck
        plans = (ranged_plan_of(rows, ends, *of_call, in_phases=in_phases) for in_phases in (False, True))
        ratios += [8 * plan.nbytes * rows.tokens / bits for plan in plans if plan is not None and bits]
    why: dict[str, Any] = {"why": "nothing"}
    if ratios:
        why = {"why": "trial" if min(ratios) <= MOST_OVER else "bytes", "ratio": round(min(ratios), 3)}
    return {"undivided": {**why, "mixes": mixes}}


def _mixes(tape: Tape, steps: Mapping[int, str]) -> dict[str, int]:
    nbytes: collections.Counter[str] = collections.Counter()
    for number, why in steps.items():
        nbytes[why] += sum(tape.storage(content)[1] for content in tape.steps[number].makes)
    return dict(nbytes.most_common(MOST_REASONS))
