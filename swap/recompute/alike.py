"""Calls of layers that differ in sizes alone: the plan of one of them is carried over to the others.

A router sends other numbers of rows to a rank's experts in each call, so each call has a log of its own, and to plan it anew
takes longer than the layer. But the decision does not depend on sizes: what is kept, and which steps run again. Two calls
have the same form where their operators, their contents, and what can be kept of these are equal. Then only the code of
what is replayed is written anew, with the new call's sizes.

A plan made where experts had few rows may keep too much where they have many. So calls of one form are told apart by the
bytes that they save, to within a fifth, and a plan that would keep a much larger share of them is not carried over.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

from memo.lru import LRU
from memo.swap.recompute.tape.form import have_same_form
from memo.swap.recompute.tape.plan import Plan, plan_on
from memo.swap.recompute.tape.tape import Tape

if TYPE_CHECKING:
    from memo.swap.levels import LayerCosts, Setting
    from memo.swap.recompute.plans import Found
    from memo.swap.recompute.recorded_call import OpenCall, RecordedCall

MOST_FORMS = 512
CLASSES_A_DOUBLING = 4
"""Calls are told apart by classes of saved bytes, as many for each doubling of the bytes."""
MOST_SHARE_GROWTH = 9 / 8
"""Largest ratio of the share of the saved bytes that a plan keeps of a call to the share that it kept where it was made."""


class _Planned(NamedTuple):
    """Plan of a call, with the tape and the saved bytes that it was made for, and the known costs of its levels."""

    tape: Tape
    saved_nbytes: int
    found: Found
    costs: LayerCosts | None


class PlanReuse:
    """Plans by the form of a call: everything that a plan depends on, except sizes."""

    def __init__(self) -> None:
        self._planned: LRU[tuple[Any, ...], _Planned] = LRU(MOST_FORMS)

    def add(
        self,
        call: OpenCall,
        recorded: RecordedCall,
        setting: Setting,
        opaque: frozenset[int],
        tape: Tape,
        found: Found,
        costs: LayerCosts | None,
    ) -> None:
        """Keeps the plan found for a call with this tape, in which something unseen writes into storages `opaque`."""
        key = _key(call, recorded, setting, opaque)
        self._planned[key] = _Planned(tape, recorded.saved_nbytes, found, costs)

    def drop(self, call: OpenCall, recorded: RecordedCall, setting: Setting, opaque: frozenset[int]) -> None:
        """Forgets the plan of calls of this form."""
        self._planned.pop(_key(call, recorded, setting, opaque))

    def plan_of(
        self, call: OpenCall, recorded: RecordedCall, setting: Setting, opaque: frozenset[int]
    ) -> tuple[Found, LayerCosts | None] | None:
        """Plan of an earlier call of the same form, with this call's sizes; None where there is none that fits."""
        before = self._planned.get(_key(call, recorded, setting, opaque))
        if before is None:
            return None
        tape = Tape(recorded.key, opaque)
        if not have_same_form(before.tape, tape):
            return None
        found: Found | None = before.found
        if isinstance(found, Plan):
            most = MOST_SHARE_GROWTH * found.cut.keep_cost * recorded.saved_nbytes
            found = plan_on(tape, found)
            if found is not None and found.cut.keep_cost * before.saved_nbytes > most:
                return None
        return None if found is None else (found, before.costs)


def _key(call: OpenCall, recorded: RecordedCall, setting: Setting, opaque: frozenset[int]) -> tuple[Any, ...]:
    # The setting that the call has is not always the one that is planned: a layer may keep less for lack of room.
    ended = recorded.ended
    size = round(CLASSES_A_DOUBLING * math.log2(max(1, recorded.saved_nbytes)))
    return (call.kind, setting, opaque, size, ended.sources, ended.wanted, ended.stuck, *recorded.operators)
