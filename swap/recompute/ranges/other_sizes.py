"""Plan of token ranges carried over to another tape of its form, where nothing in the ranges differs in size."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from memo.swap.recompute.ranges.ranged_plan import RangedPlan, Span, kept_nbytes_of
from memo.swap.recompute.ranges.rows import TokenRows
from memo.swap.recompute.tape.form import have_same_sizes
from memo.swap.recompute.tape.plan import Plan, plan_on
from memo.swap.recompute.tape.tape import Tape

__all__ = ["ranged_plan_on"]


def ranged_plan_on(tape: Tape, plan: RangedPlan, saved: Sequence[int]) -> RangedPlan | None:
    """The plan for a tape of the same form, on which autograd saved storages `saved`; None where it does not fit.

    What mixes tokens is replayed whole, with the sizes of this tape. Spans stay as they are: the rules that proved that
    their steps may run on a part of the tokens would see equal arguments and sizes here, and read all else as it is.
    """
    before = plan.rows.tape
    spans = frozenset(number for span in plan.spans for number in span.cut.replayed)
    if not (_is_divided_alike(plan.rows, tape) and have_same_sizes(before, tape, spans)):
        return None
    replays: list[Span | Plan] = []
    for replay in plan.replays:
        other = replay if isinstance(replay, Span) else plan_on(tape, replay)
        if other is None:
            return None
        replays.append(other)
    rows, sources = dataclasses.replace(plan.rows, tape=tape), plan.spans[0].sources
    kept = tuple(kept_nbytes_of(rows, sources, replays, plan.heads, saved))
    return dataclasses.replace(plan, rows=rows, replays=tuple(replays), kept_nbytes=kept)


def _is_divided_alike(rows: TokenRows, tape: Tape) -> bool:
    """True where everything that has a token axis has the same size and the same bytes of memory."""
    return all(rows.tape.geometry(value) == tape.geometry(value) for value, _ in rows.axes) and all(
        rows.tape.storage(content)[1] == tape.storage(content)[1] for content in rows.rows
    )
