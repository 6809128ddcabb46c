"""Operator log of one forward of a layer; a recompute is checked against it, line by line.

A run that did anything else would give wrong gradients, silently where the shapes agree. So each operator must come in
the same order with the same numbers, on tensors of the same provenance: arguments, results of the same line, or
tensors from elsewhere (a parameter, a table of the model's), unchanged since. Shapes may follow the number of tokens.

It owns the comparison only: a script is written in forward (Scripted, TokenAxisProver) and read in backward
(replay).
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from memo.swap.engine.saved_storage import version_of
from memo.swap.recompute.axis.operator_rules import tensors_in
from memo.swap.recompute.axis.operators import Given
from memo.swap.recompute.record.dispatch_mode import Aside, SleepingMode
from memo.swap.recompute.record.provenance import (
    UNKNOWN,
    Operand,
    Origin,
    Origins,
    alike,
    cast_parameter,
    copy_of,
    made_by_compiler,
    operand_of,
    same_lengths,
)
from memo.swap.tensor_kinds import has_storage

if TYPE_CHECKING:
    from memo.swap.recompute.record.token_local_functions import TokenLocalCall

__all__ = ["Diverged", "Reading", "Script", "Scripted"]

_BEGIN, _END = "memoized function", "its end"

_Line = tuple[Any, tuple[Any, ...], tuple[int, ...], tuple[Operand | None, ...]]
"""What was called, numbers, lengths, tensors."""
_SEEN: dict[_Line, _Line] = {}  # layers repeat, and so do their lines: one object each spares the garbage collector
_MOST_SEEN = 10_000


class Diverged(Exception):
    """The second run does something else than the first; the message says what."""


class Script:
    """Operator log of one forward, written while it runs; `given` are its argument tensors."""

    def __init__(self, given: Iterable[torch.Tensor]) -> None:
        self.reason: str | None = None
        """Why the forward must not run again."""
        self.lines: list[_Line] = []
        self.given: list[Origin | None] = []
        """Of the arguments; several may hold one storage."""
        self._origins = Origins()
        self._found = 0
        for number, tensor in enumerate(given):
            self.given.append(self._origins.of_argument(tensor, number))

    def calls(self, given: Given) -> Origin:
        """An operator is about to be called. Returns the origin of what it makes."""
        operator, tensors = given.operator, given.tensors
        if operator.keeps_content:
            return copy_of(self._operand(tensors[0]))
        origin = self.line(operator.func, given.numbers, given.lengths, () if operator.is_constant else tensors)
        if self.reason is None:
            self._look_for_traces(given)
        return origin

    def _look_for_traces(self, given: Given) -> None:
        func = given.operator.func
        if given.operator.writes and any(self.took(tensor) for tensor in given.changed()):
            self.reason = f"{func.overloadpacket} changes something from outside the layer in place"
        if given.kwargs.get("generator") is not None:
            self.reason = f"{func.overloadpacket} draws from a generator of its own"

    def begins(self, function: Callable[..., Any]) -> None:
        """Logs the call of a memoized function; a run that knows its results leaves it out."""
        self.line(_BEGIN, (function,))

    def ends(self, function: Callable[..., Any], out: Any) -> None:
        """Logs the return of a memoized function, whose results `out` are new."""
        self.makes(out, self.line(_END, (function,)), anew=True)

    def line(
        self,
        what: Any,
        numbers: Sequence[Any] = (),
        lengths: Sequence[int] = (),
        given: Iterable[torch.Tensor] = (),
    ) -> Origin:
        """One line. Returns the origin of what it makes."""
        line = (what, tuple(numbers), tuple(lengths), tuple([self._operand(tensor) for tensor in given]))
        if len(_SEEN) > _MOST_SEEN:
            _SEEN.clear()
        self.lines.append(_SEEN.setdefault(line, line))
        return Origin((len(self.lines), 0))

    def _operand(self, tensor: torch.Tensor) -> Operand | None:
        """Provenance of an operand in the forward."""
        if not has_storage(tensor):
            return None
        storage = tensor.untyped_storage()
        origin = self._origins.find(storage)
        if origin is None:
            origin = self._elsewhere(tensor)
            self._origins.put(storage, origin)
        if origin.states is not None:
            origin.states.add((version_of(tensor), tensor.requires_grad))
        return operand_of(tensor, origin)

    def _elsewhere(self, tensor: torch.Tensor) -> Origin:
        """Origin of a tensor that is neither an argument nor a result."""
        if made_by_compiler(tensor):
            self.reason = "a function in it is compiled, and what that reads is not seen"
            return UNKNOWN
        parameter = cast_parameter(tensor)
        if parameter is not None:
            return dataclasses.replace(copy_of(self._operand(parameter)), states=set())
        self._found += 1
        return Origin((-self._found, 0), states=set())

    def took(self, tensor: torch.Tensor) -> bool:
        """True for a storage that the forward took from elsewhere."""
        return has_storage(tensor) and self.found(tensor.untyped_storage()) is not None

    def knows(self, tensor: torch.Tensor) -> bool:
        """False for what was neither given nor used by an operator, nor made by one: a compiled function's own."""
        return not has_storage(tensor) or self._origins.find(tensor.untyped_storage()) is not None

    def found(self, storage: torch.UntypedStorage) -> Origin | None:
        """The origin of a storage that the forward took from elsewhere; None for any other."""
        origin = self._origins.find(storage)
        return None if origin is None or origin.states is None else origin

    def makes(self, out: Any, origin: Origin, *, anew: bool = False) -> None:
        """An operator has returned."""
        for number, tensor in enumerate(tensors_in(out)):
            if has_storage(tensor):
                known = self._origins.find(tensor.untyped_storage())
                if known is None or (anew and known.states is None):
                    self._origins.put(tensor.untyped_storage(), origin.of_result(tensor, number))

    def operators(self) -> tuple[Any, ...]:
        """Operators in order, without those inside memoized functions, which may differ from rank to rank."""
        found: list[Any] = []
        depth = 0
        for what, *_ in self.lines:
            depth -= what is _END
            if not depth:
                found.append(what)
            depth += what is _BEGIN
        return tuple(found)


class Reading:
    """A script, while a second run is held to it, whose arguments hold the storages of `given`.

    `fewer` is by how many tokens they are shorter than the first run's; None where they are its own. `here` names the
    compute stream that the caller is on.
    """

    def __init__(
        self, script: Script, given: Iterable[torch.Tensor], *, fewer: int | None, here: Callable[[], int]
    ) -> None:
        self._script = script
        self._lines = iter(script.lines)
        self.read = 0
        """How many lines, by now."""
        self.streams: set[int] = set()
        """The compute streams that operators were called on."""
        self._here = here
        self._step = fewer or 0
        self._origins = Origins()
        for origin, tensor in zip(script.given, given, strict=True):
            if origin is not None and has_storage(tensor):
                # What is cut lies somewhere else.
                self._origins.put(tensor.untyped_storage(), origin if fewer is None else origin.somewhere())

    def calls(self, given: Given) -> Origin:
        """Checks an operator against the next line, and returns the origin of its results.

        Raises:
            Diverged: it is another operator, or its operands have other origins.
        """
        self.streams.add(self._here())
        operator, tensors = given.operator, given.tensors
        if operator.keeps_content:
            return copy_of(self._operand(operator.func, tensors[0]))
        return self.line(operator.func, given.numbers, given.lengths, () if operator.is_constant else tensors)

    def begins(self, function: Callable[..., Any]) -> None:
        """Raises Diverged unless it is this function's turn."""
        self.line(_BEGIN, (function,))

    def ends(self, function: Callable[..., Any], out: Any) -> None:
        """Raises Diverged unless the function has done all that it did."""
        self.makes(out, self.line(_END, (function,)), anew=True)

    def leaves_out(self, function: Callable[..., Any]) -> Origin:
        """Passes over a function whose results are known. Raises Diverged unless it is its turn."""
        self.begins(function)
        depth = 1
        while depth:
            what = next(self._lines)[0]
            self.read += 1
            depth += (what is _BEGIN) - (what is _END)
        return Origin((self.read, 0))

    def line(
        self,
        what: Any,
        numbers: Sequence[Any] = (),
        lengths: Sequence[int] = (),
        given: Iterable[torch.Tensor] = (),
    ) -> Origin:
        """Raises Diverged unless this is the next line. Returns the origin of what it makes."""
        line = next(self._lines, None)
        if line is None or line[0] != what:
            raise Diverged(f"it called {what} instead of {'nothing' if line is None else line[0]}")
        if line[1] != tuple(numbers):
            raise Diverged(f"it called {what} with {_told(numbers)} instead of {_told(line[1])}")
        if line[2] != tuple(lengths) and not same_lengths(lengths, line[2], self._step):
            raise Diverged(f"it called {what} with {_told(lengths)} instead of {_told(line[2])}")
        operands = tuple([self._operand(what, tensor) for tensor in given])
        if operands != line[3]:
            self._compare(what, operands, line[3])
        self.read += 1
        return Origin((self.read, 0))

    def _compare(self, what: Any, ours: Sequence[Operand | None], theirs: Sequence[Operand | None]) -> None:
        """Raises Diverged where a call was given something else."""
        pairs = itertools.zip_longest(ours, theirs)
        if not all(alike(one, other, self._step) for one, other in pairs if one is not other):
            raise Diverged(f"it gave {what} other tensors")

    def _operand(self, what: Any, tensor: torch.Tensor) -> Operand | None:
        """Raises Diverged for a tensor that is neither given nor made, nor what the first run found."""
        if not has_storage(tensor):
            return None
        storage = tensor.untyped_storage()
        origin = self._origins.find(storage)
        if origin is None:
            origin = self._script.found(storage)
            if origin is None:
                raise Diverged(f"{what} was given a tensor of shape {tuple(tensor.shape)} that is new to it")
            if origin.states is not None and (version_of(tensor), tensor.requires_grad) not in origin.states:
                raise Diverged(
                    f"{what} was given a tensor of shape {tuple(tensor.shape)} from outside the layer that has changed since"
                )
        return operand_of(tensor, origin)

    def makes(self, out: Any, origin: Origin, *, anew: bool = False) -> None:
        """An operator has returned."""
        for number, tensor in enumerate(tensors_in(out)):
            if has_storage(tensor):
                storage = tensor.untyped_storage()
                known = self._origins.find(storage) or self._script.found(storage)
                if known is None or (anew and known.states is None):
                    self._origins.put(storage, origin.of_result(tensor, number))


class Scripted(SleepingMode):
    """Runs a layer along a script: writes it in a forward, or holds a second run to it."""

    def __init__(self, script: Script | Reading) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._script = script

    def called(self, given: Given) -> Any:
        """Runs an operator and logs it."""
        origin = self._script.calls(given)
        out = given.call()
        self._script.makes(out, origin)
        return out

    def memoized(self, function: Callable[..., Any], args: Any, kwargs: dict[str, Any], token_dim: int | None) -> Any:
        """Runs a memoized function, logged as one operator."""
        self._script.begins(function)
        out = function(*args, **kwargs)
        self._script.ends(function, out)
        return out

    def token_local(self, call: TokenLocalCall) -> torch.Tensor:
        """Runs a token-local function, logged as one operator."""
        if self.asleep:
            return call.run()
        origin = self._script.line(str(call), given=tensors_in((call.x, call.others)))
        with Aside(self):
            out = call.run()
        self._script.makes(out, origin)
        return out


def _told(numbers: Sequence[Any]) -> str:
    return ", ".join(map(str, numbers)) or "no numbers"
