"""Agreement on the collectives that a layer's replay repeats, among the ranks that it talks to.

Each rank has a tape of its own, and may keep and replay other contents than the others. Only the collectives must be
alike: repeated by all ranks or by none, in the same order. What is agreed holds for a kind of call, and kinds are told
apart by what is equal on all ranks anyway: the layer's setting, the shape of its input, and the collectives that the
forward ran. So all ranks meet a new kind together:

    first call    each rank says which collectives it would repeat; what one rank keeps, all keep. They try out together
    later calls   nothing is exchanged: another log is planned on this rank alone, under what was agreed
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from memo.lru import LRU

if TYPE_CHECKING:
    from memo.swap.recompute.rank_agreement import AgreeingRanks
    from memo.swap.recompute.tape.log import LoggedCollective
    from memo.swap.recompute.tape.tape import Tape

MOST_KINDS = 256
"""Kinds of calls remembered of one layer; counted by layer, so that all ranks forget alike."""


@dataclasses.dataclass(frozen=True, slots=True)
class CollectiveAgreement:
    """Agreement on a kind of call, equal on all ranks, and the findings of this rank's trial of it."""

    repeats: tuple[bool, ...]
    """For each collective of the call whether replays run it."""
    operators: tuple[Any, ...] = ()
    """Operators of the tape that was tried out."""
    wrong: frozenset[int] = frozenset()
    """Its steps that gave something else."""
    opaque: frozenset[int] = frozenset()
    """Its storages that something unseen writes into."""

    def known_of(self, tape: Tape) -> tuple[frozenset[int], frozenset[int]]:
        """Wrong steps and opaque storages of another tape: those of the part that both have in common."""
        alike = 0
        for step, operator in zip(tape.steps, self.operators, strict=False):
            if step.operator != operator:
                break
            alike += 1
        storages = {tape.contents[content].storage for step in tape.steps[:alike] for content in step.makes}
        before = {number for number, (_, _, maker, _) in enumerate(tape.storages) if maker < 0}
        return frozenset(step for step in self.wrong if step < alike), self.opaque & (storages | before)


@dataclasses.dataclass(frozen=True, slots=True)
class Shared:
    """The collectives of one call."""

    kind: tuple[Any, ...]
    numbers: tuple[int, ...]
    """Steps that are agreed on."""
    apart: frozenset[int]
    """Steps that talk to ranks which take part in no agreement; never repeated."""
    agreed: CollectiveAgreement | None

    def allow(self, steps: Sequence[int] | frozenset[int]) -> bool:
        """True if a replay of these steps is as agreed."""
        if not self.numbers:
            return self.apart.isdisjoint(steps)
        return self.agreed is not None and self.repeated_by(steps) == self.agreed.repeats

    def repeated_by(self, steps: Sequence[int] | frozenset[int]) -> tuple[bool, ...]:
        """For each collective that is agreed on whether it is one of these steps."""
        return tuple(number in steps for number in self.numbers)

    @property
    def never(self) -> frozenset[int]:
        """Steps that are not repeated, by what was agreed."""
        repeats = () if self.agreed is None else self.agreed.repeats
        kept = (number for number, again in zip(self.numbers, repeats, strict=False) if not again)
        return self.apart.union(kept)

    @property
    def always(self) -> frozenset[int]:
        """Steps that are repeated, needed or not, by what was agreed."""
        repeats = () if self.agreed is None else self.agreed.repeats
        return frozenset(number for number, again in zip(self.numbers, repeats, strict=False) if again)


class Agreements:
    """Agreements of the ranks, by layer and kind of call."""

    def __init__(self, ranks: AgreeingRanks) -> None:
        self._ranks = ranks
        self._kinds: dict[str, LRU[tuple[Any, ...], CollectiveAgreement]] = {}

    def shared(self, layer: str, kind: tuple[Any, ...], collectives: Sequence[LoggedCollective]) -> Shared:
        """The collectives of a call.

        Args:
            layer: its name.
            kind: setting and shape of the input, equal on all ranks.
            collectives: of the call, in order.
        """
        if not collectives:
            return Shared((), (), frozenset(), None)
        partners = set(self._ranks.partners(layer))
        ours = [collective for collective in collectives if partners.issuperset(collective.groups)]
        apart = frozenset(other.number for other in collectives if other not in ours)
        kind = (*kind, *(collective[1:] for collective in ours))
        agreed = self._kinds[layer].get(kind) if ours and layer in self._kinds else None
        return Shared(kind, tuple(collective.number for collective in ours), apart, agreed)

    def settle(self, layer: str, shared: Shared, repeated: tuple[bool, ...]) -> Shared:
        """Agreement on the collectives that every rank would repeat. A collective call."""
        agreed = CollectiveAgreement(self._ranks.all_of(layer, repeated))
        return dataclasses.replace(shared, agreed=agreed)

    def add(self, layer: str, shared: Shared, agreed: CollectiveAgreement) -> Shared:
        """Keeps an agreement for the calls of its kind."""
        self._kinds.setdefault(layer, LRU(MOST_KINDS))[shared.kind] = agreed
        return dataclasses.replace(shared, agreed=agreed)
