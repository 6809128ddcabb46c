"""What one forward of a layer called, operator by operator, and what it took from elsewhere; a second run is held to it.

A run that did anything else would give other gradients, and nobody would notice where the shapes agree. So each operator is
called again in its turn with the same numbers, on tensors that the run was given, that it made, or that the first run took
from elsewhere: a parameter, a table of the model's, unchanged since. Sizes are left out, which follow the number of tokens.

It owns the comparison and not what becomes of it: a script is written in forward (Scripted, noting) and read in backward
(replay).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from weakref import ref

import torch
from torch.nn import Parameter

from memo.swap.aside import Aside, SleepingMode
from memo.swap.identity import Identities
from memo.swap.marked import Marked
from memo.swap.tokenrules import tensors_in

__all__ = ["Diverged", "Reading", "Script", "Scripted", "made_by_compiler", "written"]

_ATEN = torch.ops.aten
_MADE = object()
_BEGIN, _END = "memoized function", "its end"

# Whether these are called depends on how a tensor lies in memory, is a part at all, or was cast before; that is compared
# where it is saved.
_OF_LAYOUT = frozenset(
    getattr(_ATEN, name)
    for name in (
        "_reshape_alias", "_to_copy", "_unsafe_view", "alias", "as_strided", "clone", "detach", "expand", "reshape",
        "slice", "view",
    )
)  # fmt: skip
# A constant is new each time; and a parameter that the forward found cast, autocast casts again.
_TAKES_ANY = frozenset({_ATEN.lift_fresh.default, _ATEN._to_copy.default})
_NUMBERS = frozenset({bool, int, float, complex, str, torch.dtype})
_NO_SIZES = frozenset({"dim", "dim0", "dim1", "dims", "index", "k", "start"})

_Line = tuple[Any, tuple[Any, ...]]
_SEEN: dict[_Line, _Line] = {}  # layers repeat, and so do their lines: one object each spares the garbage collector
_MOST_SEEN = 10_000


class Diverged(Exception):
    """The second run does something else than the first; the message says what."""


class Script:
    """Of one forward, whose arguments hold the storages of `given`."""

    def __init__(self, given: Iterable[torch.Tensor]) -> None:
        self.reason: str | None = None
        """Why the forward must not run again."""
        self.lines: list[_Line] = []
        self._storages = Identities()
        """Storage -> made in the forward, or the states of version and gradient in which it was taken from elsewhere."""
        self.makes(list(given))

    def calls(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """An operator is about to be called."""
        if not isinstance(func, torch._ops.OpOverload):
            self.line(func)
        elif func.overloadpacket not in _OF_LAYOUT:
            self.line(func, *_numbers(func, args, kwargs))
        for tensor in tensors_in((args, kwargs)):
            self.takes(tensor)
        if self.reason is not None:
            return
        for position, name in written(func):
            for tensor in tensors_in(args[position] if position < len(args) else kwargs.get(name)):
                if self.took(tensor):
                    self.reason = f"{func.overloadpacket} changes something from outside the layer in place"
        if kwargs.get("generator") is not None:
            self.reason = f"{func.overloadpacket} draws from a generator of its own"

    def begins(self, function: Callable[..., Any]) -> None:
        """A function that the user marked is about to be called; a run that knows its results leaves it out."""
        self.line(_BEGIN, function)

    def ends(self, function: Callable[..., Any]) -> None:
        """It has returned."""
        self.line(_END, function)

    def line(self, what: Any, *numbers: Any) -> None:
        """One line."""
        line = (what, numbers)
        if len(_SEEN) > _MOST_SEEN:
            _SEEN.clear()
        self.lines.append(_SEEN.setdefault(line, line))

    def takes(self, tensor: torch.Tensor) -> None:
        """The forward uses a tensor."""
        if not _has_storage(tensor):
            return
        storage = tensor.untyped_storage()
        known = self._storages.find(ref(storage))
        if known is _MADE:
            return
        if known is None:
            if made_by_compiler(tensor):
                self._storages[storage] = _MADE
                return
            known = self._storages[storage] = set()
        known.add((tensor._version, tensor.requires_grad))

    def took(self, tensor: torch.Tensor) -> bool:
        """Whether the forward took this tensor's storage from elsewhere."""
        return _has_storage(tensor) and self.states(tensor.untyped_storage()) is not None

    def makes(self, out: Any) -> None:
        """An operator has returned."""
        for tensor in tensors_in(out):
            if _has_storage(tensor):
                storage = tensor.untyped_storage()
                if self._storages.find(ref(storage)) is None:
                    self._storages[storage] = _MADE

    def operators(self) -> tuple[Any, ...]:
        """What was called in order, but for what marked functions called, which may differ from rank to rank."""
        found: list[Any] = []
        depth = 0
        for what, _ in self.lines:
            depth -= what is _END
            if not depth:
                found.append(what)
            depth += what is _BEGIN
        return tuple(found)

    def states(self, storage: torch.UntypedStorage) -> set[tuple[int, bool]] | None:
        """In which the forward took a storage from elsewhere; None for one that it did not."""
        known = self._storages.find(ref(storage))
        return None if known is _MADE else known


class Reading:
    """A script, while a second run is held to it, whose arguments hold the storages of `given`."""

    def __init__(self, script: Script, given: Iterable[torch.Tensor]) -> None:
        self._script = script
        self._lines = iter(script.lines)
        self._made = Identities()
        for tensor in given:
            if _has_storage(tensor):
                self._made[tensor.untyped_storage()] = _MADE

    def calls(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Raises Diverged for an operator that is not the next one, or works on something else."""
        if not isinstance(func, torch._ops.OpOverload):
            self.line(func)
        elif func.overloadpacket not in _OF_LAYOUT:
            self.line(func, *_numbers(func, args, kwargs))
        if func not in _TAKES_ANY:
            for tensor in tensors_in((args, kwargs)):
                self.takes(func, tensor)

    def begins(self, function: Callable[..., Any]) -> None:
        """Raises Diverged unless it is this function's turn."""
        self.line(_BEGIN, function)

    def ends(self, function: Callable[..., Any]) -> None:
        """Raises Diverged unless the function has done all that it did."""
        self.line(_END, function)

    def leaves_out(self, function: Callable[..., Any]) -> None:
        """Passes over a function whose results are known. Raises Diverged unless it is its turn."""
        self.begins(function)
        depth = 1
        while depth:
            what = next(self._lines)[0]
            depth += (what is _BEGIN) - (what is _END)

    def line(self, what: Any, *numbers: Any) -> None:
        """Raises Diverged unless this is the next line."""
        line = next(self._lines, None)
        if line is None or line[0] != what:
            raise Diverged(f"it called {what} instead of {'nothing' if line is None else line[0]}")
        if line[1] != numbers:
            raise Diverged(f"it called {what} with {_told(numbers)} instead of {_told(line[1])}")

    def takes(self, what: Any, tensor: torch.Tensor) -> None:
        """Raises Diverged for a tensor that is neither given nor made, nor what the first run found."""
        if not _has_storage(tensor):
            return
        storage = tensor.untyped_storage()
        if self._made.find(ref(storage)) is _MADE:
            return
        states = self._script.states(storage)
        if states is None and not made_by_compiler(tensor):
            raise Diverged(f"{what} was given a tensor of shape {tuple(tensor.shape)} that is new to it")
        if states is not None and (tensor._version, tensor.requires_grad) not in states:
            raise Diverged(
                f"{what} was given a tensor of shape {tuple(tensor.shape)} from outside the layer that has changed since"
            )

    def makes(self, out: Any) -> None:
        """An operator has returned."""
        for tensor in tensors_in(out):
            if _has_storage(tensor):
                storage = tensor.untyped_storage()
                if self._script.states(storage) is None:
                    self._made[storage] = _MADE


class Scripted(SleepingMode):
    """Runs a layer along a script: writes it in a forward, or holds a second run to it."""

    def __init__(self, script: Script | Reading) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._script = script

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.asleep:
            return func(*args, **kwargs)
        self._script.calls(func, args, kwargs)
        out = func(*args, **kwargs)
        self._script.makes(out)
        return out

    def memoized(self, function: Callable[..., Any], args: Any, kwargs: dict[str, Any], token_dim: int | None) -> Any:
        """Runs a function that the user marked."""
        self._script.begins(function)
        out = function(*args, **kwargs)
        self._script.ends(function)
        return out

    def marked(self, call: Marked) -> torch.Tensor:
        """Runs a marked function, as one operator."""
        if self.asleep:
            return call.run()
        self._script.line(str(call))
        with Aside(self):
            out = call.run()
        self._script.makes(out)
        return out


def _has_storage(tensor: torch.Tensor) -> bool:
    """True where a tensor's own bytes are all of it; of the others nothing is compared but the operators."""
    return type(tensor) in (torch.Tensor, Parameter) and tensor.layout is torch.strided and not tensor.is_nested


def made_by_compiler(tensor: torch.Tensor) -> bool:
    """True for a result of torch.compile's, whose operators no mode sees."""
    node = tensor.grad_fn
    return node is not None and node.name().startswith("CompiledFunction")


@functools.cache
def written(func: Any) -> list[tuple[int, str]]:
    """Position and name of the arguments that an operator changes in place."""
    if not isinstance(func, torch._ops.OpOverload):
        return []
    return [
        (position, declared.name)
        for position, declared in enumerate(func._schema.arguments)
        if declared.alias_info is not None and declared.alias_info.is_write
    ]


def _numbers(func: torch._ops.OpOverload, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """What an operator is given besides tensors and sizes."""
    sizes = _sizes(func)
    found = [value for at, value in enumerate(args) if type(value) in _NUMBERS and at not in sizes]
    if kwargs:
        found += [value for value in kwargs.values() if type(value) in _NUMBERS]
    return tuple(found)


@functools.cache
def _sizes(func: torch._ops.OpOverload) -> frozenset[int]:
    """The positions of whole numbers that may follow the number of tokens."""
    return frozenset(
        at
        for at, declared in enumerate(func._schema.arguments)
        if str(declared.type) in ("int", "SymInt", "Optional[int]", "Optional[SymInt]")
        and declared.name not in _NO_SIZES
    )


def _told(numbers: tuple[Any, ...]) -> str:
    return ", ".join(map(str, numbers)) or "no numbers"
