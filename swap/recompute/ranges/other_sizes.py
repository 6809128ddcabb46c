"""Plan of token ranges carried over to another tape of its form, where nothing that the ranges touch differs in size."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from memo.swap.recompute.ranges.ranged_plan import RangedPlan, Span, kept_nbytes_of
from memo.swap.recompute.ranges.rows import TokenRows
from memo.swap.recompute.tape.form import sizes_of
from memo.swap.recompute.tape.plan import Plan, plan_on
from memo.swap.recompute.tape.tape import Tape

__all__ = ["ranged_plan_on"]


def ranged_plan_on(tape: Tape, plan: RangedPlan, saved: Sequence[int]) -> RangedPlan | None:
    """The plan for a tape of the same form, on which autograd saved storages `saved`; None where it does not fit.

    What mixes tokens is replayed whole, with the sizes that it has here. Spans stay as they are: the rules that proved their
    steps to run on a part of the tokens have seen the same arguments and the same sizes, and read the rest as it is.
    """
    divided = plan.divided_steps
    if not _is_divided_alike(plan.rows, tape) or sizes_of(plan.rows.tape, divided) != sizes_of(tape, divided):
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
    """True where all that runs over tokens has the same size and the same memory."""
    return all(rows.tape.geometry(value) == tape.geometry(value) for value, _ in rows.axes) and all(
        rows.tape.storage(content)[1] == tape.storage(content)[1] for content in rows.rows
    )
