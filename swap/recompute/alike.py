"""Calls that differ in sizes alone: what was planned for one of them is carried over to the others.

A router sends other numbers of rows to a rank's experts in each call, so each call has a log of its own, and to plan it anew
takes longer than the layer. But the decision is the same: what is kept, and which steps run again. A call is of an
earlier one's form where operators, contents, and what can be kept of them are the same; then only the code of what is
replayed whole is written anew, with this call's sizes. Ranges of tokens are carried over where nothing that they touch has
another size.

A plan made where experts had few rows may keep too much where they have many. So calls of one form are told apart by the
bytes that they save, to within a fifth, and a plan that would keep a larger share of them is not carried over.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from memo.lru import LRU
from memo.swap.recompute.ranges.other_sizes import ranged_plan_on
from memo.swap.recompute.ranges.ranged_plan import RangedPlan
from memo.swap.recompute.tape.form import have_one_form
from memo.swap.recompute.tape.plan import Plan, plan_on
from memo.swap.recompute.tape.tape import Tape

if TYPE_CHECKING:
    from memo.swap.recompute.plans import Found
    from memo.swap.recompute.recorded_call import OpenCall, RecordedCall
    from memo.swap.token_levels import LayerCosts

__all__ = ["AlikeCalls"]

MOST_FORMS = 512
SIZES_EACH = 4
"""Classes of saved bytes for each doubling of them."""
MOST_MORE = 9 / 8
"""Share of the saved bytes that a plan keeps, over that where it was made."""


class _Planned(NamedTuple):
    """What was found for a call, with what is known of its levels' costs."""

    tape: Tape
    saved_nbytes: int
    found: Found
    costs: LayerCosts | None


class AlikeCalls:
    """Plans by the form of a call: by all that decides on it but sizes."""

    def __init__(self) -> None:
        self._planned: LRU[tuple[Any, ...], _Planned] = LRU(MOST_FORMS)

    def add(
        self,
        call: OpenCall,
        recorded: RecordedCall,
        opaque: frozenset[int],
        tape: Tape,
        found: Found,
        costs: LayerCosts | None,
    ) -> None:
        """Notes what was found for a call with that tape, in which something unseen writes into storages `opaque`."""
        key = _key(call, recorded, opaque)
        self._planned[key] = _Planned(tape, recorded.saved_nbytes, found, costs)

    def plan_of(
        self, call: OpenCall, recorded: RecordedCall, opaque: frozenset[int]
    ) -> tuple[Found, LayerCosts | None] | None:
        """What was found for a call of this one's form, with this one's sizes; None where it does not fit."""
        before = self._planned.get(_key(call, recorded, opaque))
        if before is None:
            return None
        tape = Tape(recorded.key, opaque)
        if not have_one_form(before.tape, tape):
            return None
        found: Found | None = before.found
        if isinstance(found, Plan):
            most = MOST_MORE * found.cut.keep_cost * recorded.saved_nbytes
            found = plan_on(tape, found)
            if found is not None and found.cut.keep_cost * before.saved_nbytes > most:
                return None
        elif isinstance(found, RangedPlan):
            most = MOST_MORE * found.nbytes * recorded.saved_nbytes
            found = ranged_plan_on(tape, found, (*recorded.wanted, *recorded.stuck))
            if found is not None and found.nbytes * before.saved_nbytes > most:
                return None
        return None if found is None else (found, before.costs)


def _key(call: OpenCall, recorded: RecordedCall, opaque: frozenset[int]) -> tuple[Any, ...]:
    ended = recorded.ended
    size = round(SIZES_EACH * math.log2(max(1, recorded.saved_nbytes)))
    return (call.kind, opaque, size, ended.sources, ended.wanted, ended.stuck, *recorded.operators)
