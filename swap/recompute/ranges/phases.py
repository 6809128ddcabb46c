"""Phases of a replay: what is divided by tokens, then what mixes them and is replayed whole, then what follows, by turns.

Rows that a router sends to experts lie by expert, so the first tokens are not the first rows, and a product of a part of an
expert's rows may round in another way, whichever part the routing of a call makes it. So all routed rows of a layer are
replayed at once, by the same operators on the same shapes, once the tokens that they are taken from are all there. The same
holds for the states of a recurrence, and for whatever else mixes tokens.

    tokens         input ─ norm ─ attention ─ norm ─ router                           norm ─ ...
    routed rows                                        └─ sort ─ gather ─ experts ─ sum ─┘
    phase                          divided                         whole                divided

A content that is never repeated is kept, so nothing waits for it. After a whole phase a divided one begins with a matrix
product, since anything less is not worth a phase: of routed rows none is divided. It reads what autograd has saved of the
whole phase; where a step would read something else it belongs to the whole phase too.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from memo.swap.recompute.tape.bans import groups_of
from memo.swap.recompute.tape.plan import mask_of

if TYPE_CHECKING:
    from memo.swap.recompute.ranges.rows import TokenRows

__all__ = ["Phase", "phases_of"]


@dataclasses.dataclass(frozen=True, slots=True)
class Phase:
    """Storages that are replayed after those of the phases before, of which they may need all tokens."""

    is_divided: bool
    """By tokens; else each is kept or replayed whole."""
    storages: tuple[int, ...]


def phases_of(rows: TokenRows, banned: Collection[int], storages: Sequence[int]) -> list[Phase]:
    """The phases of a tape, in order.

    Args:
        rows: of the tape.
        banned: steps that are never repeated.
        storages: that autograd saved and a replay may give, none of them the same for all tokens.
    """
    tape = rows.tape
    saved = {tape.last[storage] for storage in tape.saved_storages}
    numbers: list[int] = []  # of each content's phase; the odd ones are whole
    for content, known in enumerate(tape.contents):
        number = 0
        if known.writer >= 0 and known.writer not in banned and content not in rows.same:
            reads = tape.steps[known.writer].reads
            number = max((numbers[read] for read in reads), default=0)
            waits = any(numbers[read] % 2 == 1 and read not in saved for read in reads)
            begins = number % 2 == 0 or "matmul" in groups_of(tape.steps[known.writer].operator)
            is_whole = waits or not begins or not rows.divides(content)
            number += number % 2 != is_whole
        numbers.append(number)
    by_number: dict[int, list[int]] = {}
    for storage in storages:
        content = tape.last[storage]
        if tape.contents[content].writer not in banned or mask_of(tape, content) is not None:
            number = numbers[content] or int(not rows.divides(content))
            by_number.setdefault(number, []).append(storage)
    found: list[Phase] = []
    for number, here in sorted(by_number.items()):
        if found and found[-1].is_divided == (number % 2 == 0):
            here = [*found.pop().storages, *here]
        found.append(Phase(number % 2 == 0, tuple(here)))
    return found
