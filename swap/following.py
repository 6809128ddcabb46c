"""Holds one forward of a layer to a precedent, call by call: while it does the same, all that was proven holds of it too.

    the same    operator, numbers, the operands' storages and how they lie in them; what it makes lies as it lay
    another     the forward is proven from there on, and what is known of its tensors so far is handed over

What a proof looks at is looked at here: a tensor that is more than its bytes, one that a compiled function made, one found
elsewhere that is another. The script learns of each that is found elsewhere when it is used, with its version.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any
from weakref import ref

from memo.swap.capture import is_understood
from memo.swap.origins import made_by_compiler
from memo.swap.precedent import Recording
from memo.swap.tokenrules import tensors_in
from memo.swap.tokens import geometry_of

if TYPE_CHECKING:
    import torch

    from memo.swap.precedent import Precedent, Save, Step, Storages
    from memo.swap.script import Script
    from memo.swap.tokens import TokenMap

__all__ = ["Following"]


class Following:
    """One forward whose arguments are those of the precedent; `storages` are theirs."""

    def __init__(self, precedent: Precedent, storages: Storages, script: Script) -> None:
        self.mixed_by = precedent.mixed_by
        """What mixes tokens in a forward that does all that its precedent did."""
        self._precedent = precedent
        self._steps = precedent.steps
        self._saves = precedent.saves
        self._storages = storages
        self._script = script
        self._at = 0
        self._saved = 0

    def calls(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> tuple[Step, Sequence[torch.Tensor]] | None:
        """The next step and the tensors that a call is given, if it is that step; None for any other call."""
        if self._at == len(self._steps):
            return None
        step = self._steps[self._at]
        tensors = step.form.tensors(func, args, kwargs)
        return None if tensors is None or not self._are_operands(tensors, step) else (step, tensors)

    def _are_operands(self, tensors: Sequence[torch.Tensor], step: Step) -> bool:
        storages = self._storages
        find, script = storages.find, self._script
        for tensor, (number, geometry, found) in zip(tensors, step.operands, strict=False):  # a constant has none
            if not is_understood(tensor) or geometry_of(tensor) != geometry:
                return False
            known = find(ref(tensor.untyped_storage()))
            if known != number and (known is not None or found is None or number != len(storages)):
                return False
            if found is not None:
                if made_by_compiler(tensor) or script.operand(tensor) != found:
                    return False
                storages.number(tensor)
        return True

    def made(self, step: Step, out: Any) -> bool:
        """A call that is this step has returned; False where it made something else than before."""
        storages = self._storages
        results = tensors_in(out)
        if len(results) != len(step.results):
            return False
        for tensor, (number, geometry) in zip(results, step.results, strict=True):
            if storages.number(tensor) != number or geometry_of(tensor) != geometry:
                return False
        self._at += 1
        return True

    def saves(self, tensor: torch.Tensor) -> Save | None:
        """What is known of a tensor that autograd saves; None if it is not the next one, or not in its place."""
        if self._saved == len(self._saves):
            return None
        save = self._saves[self._saved]
        if save.at != self._at or not is_understood(tensor) or geometry_of(tensor) != save.described[0]:
            return None
        if self._storages.find(ref(tensor.untyped_storage())) != save.number:
            return None
        self._saved += 1
        return save

    def ends(self) -> bool:
        """The forward is over. True if it did all that its precedent did, which then is the script's."""
        if self._at < len(self._steps) or self._saved < len(self._saves):
            return False
        self._hand_over(len(self._precedent.origins), len(self._precedent.lines))
        return True

    def leave(self, tokens: TokenMap) -> tuple[Recording, str | None]:
        """The forward goes its own way from here on: hands what is known of it so far to the proof and to the script.

        Returns what will be the next precedent, and what has mixed tokens."""
        before, at = self._precedent, self._at
        step = before.steps[at] if at < len(before.steps) else None
        numbers, lines = (len(before.origins), len(before.lines)) if step is None else (step.numbers, step.lines)
        self._hand_over(numbers, lines)
        living = dict(self._storages.living())
        for step_before in before.steps[:at]:
            for number, described in step_before.learnt:
                if number in living:
                    tokens.know(living[number], described)
        recording = Recording(
            before.given,
            self._storages,
            self._script,
            steps=before.steps[:at],
            saves=before.saves[: self._saved],
            origins=before.origins[:numbers],
        )
        return recording, before.mixed_by if step is None else step.mixed_by

    def _hand_over(self, numbers: int, lines: int) -> None:
        """The forward has met so many storages and written so many lines, of which the script is told."""
        self._storages.forget_from(numbers)
        origins = ((storage, self._precedent.origins[number]) for number, storage in self._storages.living())
        known = ((storage, origin) for storage, origin in origins if origin is not None)
        self._script.goes_on(self._precedent.lines[:lines], known)
