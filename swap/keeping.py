"""What a recompute of a layer is given instead of computing it, kept as the forward goes, and who reads it.

That is attention, which needs all tokens, random numbers, which would come out different, and marked functions; of matrix
products the results, which one level keeps. What autograd saves is listed beside it, in order, since places are told by it.
What any of it means has been proven before (noting).
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any
from weakref import ref

import torch

from memo.swap.answers import Answer, AttentionAnswer, RandomAnswer
from memo.swap.capture import local_part
from memo.swap.identity import Identities
from memo.swap.results import Reader, Result
from memo.swap.saved import content_of
from memo.swap.tokenrules import tensors_in
from memo.swap.tokens import Axis

if TYPE_CHECKING:
    from memo.swap.called import Given, Operator
    from memo.swap.precedent import Proof
    from memo.swap.saved import Content
    from memo.swap.tokens import Meaning

__all__ = ["Keeping", "Slot"]


@dataclasses.dataclass(slots=True)
class Slot:
    """One tensor that autograd saved, in the order of saving. Made for each, so not by keywords and not frozen."""

    given: torch.Tensor
    """A detached alias."""
    tensor: torch.Tensor
    """What this rank has of it: its geometry, and its storage while the forward lasts."""
    meaning: Meaning
    content: Content
    is_outside: bool
    """The layer was given it, or has it of its own."""


class Keeping:
    """Of one forward of `tokens` tokens. `ends` says where those at level ALL and those at level MATMULS end."""

    def __init__(self, *, ends: tuple[int, int], tokens: int) -> None:
        self.slots: list[Slot] = []
        self.answers: list[Answer] = []
        self.results: list[Result] = []
        """Of matrix products, of marked functions and of collectives."""
        # Storages that stay whole though tokens are mixed in them: attention is never repeated, so neither are these.
        self.whole: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._made = Identities(brief=True)
        """Storage -> the Result that it is."""
        self._ends = ends
        self._tokens = tokens

    def save(self, tensor: torch.Tensor, meaning: Meaning, *, is_outside: bool) -> None:
        """Autograd saves a tensor."""
        given = tensor.detach()
        local = local_part(given)
        self._read([local])
        self.slots.append(Slot(given, local, meaning, content_of(tensor), is_outside))

    def call(self, operator: Operator, tensors: Sequence[torch.Tensor], out: Any, proof: Proof) -> None:
        """An operator has been called."""
        if proof.uses:
            self._read(tensors)
        if proof.is_result:
            function = None if operator.is_product else operator.func
            self.result(out, proof.meaning, tensors, line=proof.line, function=function)
        elif operator.is_attention:
            assert isinstance(proof.meaning, Axis)
            self.answers.append(AttentionAnswer(operator.func, out, proof.meaning))
            for tensor in (*tensors[3:], *tensors_in(out)):
                self.whole.add(tensor.untyped_storage())
        elif operator.is_random:
            assert isinstance(proof.meaning, Axis)
            self.answers.append(
                RandomAnswer.of(operator.func, out, proof.meaning, first=self._ends[0], tokens=self._tokens)
            )

    def changes(self, changed: Sequence[torch.Tensor]) -> None:
        """These are about to be changed in place."""
        for tensor in changed:
            self._read([tensor])
            for result in self.results:
                result.before_change_of(tensor.untyped_storage())

    def rearranges(self, given: Given) -> bool:
        """Of a join: parts of one result are put together in another order, as before and after a collective that joins or
        divides another dimension than the first."""
        storages = {tensor.untyped_storage() for tensor in given.tensors}
        return len(storages) == 1 and self._made.find(ref(storages.pop())) is not None

    def result(
        self,
        out: torch.Tensor,
        meaning: Meaning,
        given: Sequence[torch.Tensor],
        *,
        line: int,
        function: Callable[..., Any] | None = None,
    ) -> None:
        """Of a product, or of another `function` of what comes first among the tensors that it is given."""
        result = Result(
            out,
            meaning if isinstance(meaning, Axis) else None,
            position=len(self.slots),
            span=self._ends,
            tokens=self._tokens,
            line=line,
            function=function,
            source=None if function is None else self._made.find(ref(given[0].untyped_storage())),
        )
        self._read(given, result)
        self.results.append(result)
        self._made[out.untyped_storage()] = result

    def _read(self, given: Sequence[torch.Tensor], result: Result | None = None) -> None:
        """Something computes with these tensors; `result` is what it makes of them."""
        if not self.results:
            return
        for tensor in given:
            made = self._made.find(ref(tensor.untyped_storage()))
            if made is not None:
                made.read(tensor, Reader(position=len(self.slots), result=result))
