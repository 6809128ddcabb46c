"""Reasons of an architecture's bytes: what its layers keep, by operator.

Reads `manager.explain` after a forward. Layers that keep the same for the same reasons are one entry with their count.
"""

from __future__ import annotations

import collections
import re
from typing import TYPE_CHECKING, Any

from memo.errors import UsageError
from memo.swap.levels import Level
from memo.swap.recompute.explanation import Fate

if TYPE_CHECKING:
    from collections.abc import Mapping

    from memo.manager import Manager
    from memo.swap.layers import Layer
    from memo.swap.recompute.explanation import LayerExplanation
    from memo.swap.recompute.tape.tape import Tape

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
    reason, bytes and origin of what is kept (`_kept`).
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
    last = manager._recompute_policy._plans.last(layer.name)  # its tape, of which the explanation says less
    if told.refused is not None or last is None:
        return {"module": told.module, "whole": told.refused}
    choice, setting, _ = last
    level = setting if isinstance(setting, Level) else Level.SAVE_ATTENTION
    never = choice.banned(level)
    return {
        "module": told.module,
        "experts": any(_EXPERTS.search(type(part).__name__) for part in list(layer.module.modules())[1:]),
        "saved_nbytes": told.saved_nbytes,
        "kept_nbytes": told.used.kept_nbytes,
        "point": told.used.name,
        "kept": _kept(told, choice.tape, never),
    }


def _kept(told: LayerExplanation, tape: Tape, never: Mapping[int, str]) -> list[list[Any]]:
    """Operator, reason, bytes and origin of what is kept, the most bytes first.

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
