"""What one forward of a layer did and what was proven of it, operator by operator, for later ones that do the same.

    storages    numbered in the order in which a forward meets them, its arguments first
    step        one call: operator and numbers, its operands' storages, how they lie in them, what it made, what that means
    save        one tensor that autograd saved, and between which steps

It is pure data: no tensor, no storage, nothing of the layer. A forward is held to it in following.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any
from weakref import ref

from memo.swap.origins import operand_of
from memo.swap.recent import Recent
from memo.swap.tokenrules import tensors_in
from memo.swap.tokens import geometry_of

if TYPE_CHECKING:
    import torch

    from memo.swap.called import Form
    from memo.swap.origins import Operand, Origin
    from memo.swap.script import Line, Script
    from memo.swap.tokens import Described, Geometry, Meaning, TokenMap

__all__ = ["Precedent", "Precedents", "Proof", "Recording", "Save", "Step", "Storages"]

MOST_KEPT = 256
"""Kinds of calls: a run over ever new lengths must not remember them all."""

Known = tuple[int, "Described"]
"""Number of a storage, how something lies in it, and what that means."""


class Storages:
    """That a forward has met, by number."""

    def __init__(self, given: Iterable[torch.Tensor]) -> None:
        self._refs: list[ref[torch.UntypedStorage]] = []
        self._numbers: dict[ref[torch.UntypedStorage], int] = {}
        self.find = self._numbers.get
        """The number of a storage, by a weak reference to it; None for a new one."""
        for tensor in given:
            self.number(tensor)

    def __len__(self) -> int:
        return len(self._refs)

    def number(self, tensor: torch.Tensor) -> int:
        """Of a tensor's storage, which may be new."""
        known = ref(tensor.untyped_storage())
        number = self._numbers.get(known)
        if number is None:
            number = self._numbers[known] = len(self._refs)
            self._refs.append(known)
        return number

    def living(self) -> Iterator[tuple[int, torch.UntypedStorage]]:
        """Those that still exist."""
        for number, known in enumerate(self._refs):
            storage = known()
            if storage is not None:
                yield number, storage

    def forget_from(self, number: int) -> None:
        """Only those before it have been met."""
        for known in self._refs[number:]:
            del self._numbers[known]
        del self._refs[number:]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Proof:
    """What was proven of one call."""

    meaning: Meaning
    """Of its results; of attention's first."""
    uses: bool
    """It computes with the numbers of its operands, as views do not, and does not give a result of its own (results)."""
    is_result: bool
    line: int
    """How many lines the script had when it was called, with its own."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One call of an operator."""

    form: Form
    proof: Proof
    operands: tuple[tuple[int, Geometry, Operand | None], ...]
    """Number of the storage, how the tensor lies in it, and what the script calls it if it was found elsewhere."""
    results: tuple[tuple[int, Geometry], ...]
    learnt: tuple[Known, ...]
    numbers: int
    """Storages met before."""
    lines: int
    """Of the script, before."""
    mixed_by: str | None
    """What had mixed tokens before."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Save:
    """One tensor that autograd saved."""

    at: int
    """Steps before."""
    number: int | None
    """None for a storage that no step has met."""
    described: Described
    is_outside: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Precedent:
    """One forward, from its begin to its end or to where it was broken off."""

    given: tuple[Known, ...]
    steps: tuple[Step, ...]
    saves: tuple[Save, ...]
    lines: tuple[Line, ...]
    """Of its script."""
    origins: tuple[Origin | None, ...]
    """By number, as the script has them."""
    mixed_by: str | None


class Recording:
    """A precedent in the making. `steps` and `saves` of another one come first, whose course the forward took until now."""

    def __init__(
        self,
        given: tuple[Known, ...],
        storages: Storages,
        script: Script,
        *,
        steps: Sequence[Step] = (),
        saves: Sequence[Save] = (),
        origins: Sequence[Origin | None] = (),
    ) -> None:
        self._given = given
        self._storages = storages
        self._script = script
        self._steps = list(steps)
        self._saves = list(saves)
        self._origins = list(origins)
        self._lines = len(script.lines)
        self._mixed_by: str | None = None

    def begins(self, mixed_by: str | None) -> None:
        """A call is about to be proven."""
        self._lines, self._mixed_by = len(self._script.lines), mixed_by

    def step(self, form: Form, given: Sequence[torch.Tensor], proof: Proof, out: Any, tokens: TokenMap) -> None:
        """It has been."""
        numbers, storages = len(self._storages), self._storages
        operands = tuple([] if form.operator.is_constant else [self._used(tensor) for tensor in given])
        made = tensors_in(out)
        results = tuple([(storages.number(tensor), geometry_of(tensor)) for tensor in made])
        learnt = [(storages.number(tensor), tokens.described(tensor)) for tensor in made if tensor in tokens]
        self._steps.append(
            Step(
                form=form,
                proof=proof,
                operands=operands,
                results=results,
                learnt=tuple(learnt),
                numbers=numbers,
                lines=self._lines,
                mixed_by=self._mixed_by,
            )
        )
        known = {storages.number(tensor): self._script.origin(tensor) for tensor in (*given, *made)}
        self._origins += [known.get(number) for number in range(len(self._origins), len(storages))]

    def _used(self, tensor: torch.Tensor) -> tuple[int, Geometry, Operand | None]:
        found = self._script.found(tensor.untyped_storage())
        operand = None if found is None else operand_of(tensor, found)
        return self._storages.number(tensor), geometry_of(tensor), operand

    def save(self, tensor: torch.Tensor, described: Described, *, is_outside: bool) -> None:
        """Autograd has saved a tensor."""
        number = self._storages.find(ref(tensor.untyped_storage()))
        self._saves.append(Save(at=len(self._steps), number=number, described=described, is_outside=is_outside))

    def ends(self, mixed_by: str | None) -> Precedent:
        """The forward is over."""
        return Precedent(
            given=self._given,
            steps=tuple(self._steps),
            saves=tuple(self._saves),
            lines=tuple(self._script.lines),
            origins=tuple(self._origins),
            mixed_by=mixed_by,
        )


Precedents = Recent[object, Precedent]
"""Of each kind of call the last one that another forward has not followed to its end."""
