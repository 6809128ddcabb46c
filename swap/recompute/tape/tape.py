"""The tape of one layer call, read from its log: steps, and the contents of storages that they read and make.

    storage   one piece of memory
    content   what a storage holds between two writes; an operator in place makes the next content of its storage
    step      one operator with the contents that it reads and makes; views make nothing, they are taken again where needed

A tape holds no tensor. Storages that the recorder does not see all writes of are opaque: no step that reads or writes one
is repeated, and what autograd saves of them moves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from memo.swap.recompute.tape.attention import drops_by
from memo.swap.recompute.tape.filled import Region, covers, region_of
from memo.swap.recompute.tape.log import (
    CARRIED,
    FALSE,
    HIDDEN,
    LIST,
    NAMED,
    OTHER,
    OUTPUTS,
    SAVED,
    TRUE,
    Function,
    Geometry,
    Key,
    Origin,
    Ref,
    Storage,
)

_RESIZE = frozenset({"resize_", "resize_as_", "set_", "_resize_output_"})
_WHOLE = Region(period=1, starts=(0,), width=1)


@dataclasses.dataclass(frozen=True, slots=True)
class ContentUse:
    """A tensor among a step's arguments or results: a value, and what its storage holds then."""

    value: int
    content: int


@dataclasses.dataclass(frozen=True, slots=True)
class Carried:
    """An argument that is carried beside the log, by its position there."""

    position: int


class Hidden:
    """A tensor that the recorder has no number for."""


@dataclasses.dataclass(frozen=True, slots=True)
class Content:
    """What a storage holds after its `version`-th write."""

    storage: int
    version: int
    writer: int
    """Number of the step that made it; -1 where it was there before."""


@dataclasses.dataclass(slots=True)
class TapeStep:
    """One operator of the layer."""

    number: int
    operator: Any
    """Its facts (memo.swap.recompute.tape.operators), or a Function of the program."""
    args: tuple[Any, ...]
    """Arguments; Use, Carried and Hidden in place of tensors and of what may differ from call to call."""
    kwargs: dict[str, Any]
    out: Any
    """Results: Use, None and Hidden, nested as they are."""
    reads: tuple[int, ...]
    """Contents that it needs."""
    makes: tuple[int, ...]
    """Contents after it that were not before it."""
    opaque: str | None = None
    """Why it is never repeated; None if it may be."""

    @property
    def name(self) -> str:
        """Name of the operator, as `aten.mm`."""
        func = getattr(self.operator, "func", None)
        return str(self.operator) if func is None else str(getattr(func, "overloadpacket", func))


class Tape:
    """Steps, contents and saved values of one call.

    Args:
        key: its log, values and storages.
        opaque: storages that something unseen has written into.
    """

    def __init__(self, key: Key, opaque: frozenset[int] = frozenset()) -> None:
        log, self.values, self.storages = key.log, key.values, key.storages
        self.contents: list[Content] = []
        self.steps: list[TapeStep] = []
        self.saved: list[ContentUse] = []
        """What autograd saved, in order."""
        self.saved_after: dict[int, tuple[int, int]] = {}
        """The numbers of steps that had run at the first and at the last save of each storage that autograd saved."""
        self.last: list[int] = []
        """Content of each storage at the end."""
        self.opaque = set(opaque)
        self.costs: list[int] = []
        """Cost of repeating each step, in picoseconds (step_costs.py)."""
        self._now: list[int] = []
        self._written: dict[int, list[Region] | None] = {}  # regions of storages that were allocated without writing
        self._uninitialised: set[int] = set()  # of which something was read that nothing had written
        for number, (birth, *_) in enumerate(self.storages):
            self._now.append(-1)
            if birth is not Origin.MADE:
                self._make(number, -1)
        self._read(iter(log))
        self.last = self._now
        self.saved_storages = frozenset(self.values[use.value][0] for use in self.saved)
        # Another layer may read the bytes of these that nothing seen has written.
        self._uninitialised.update(at for at in self.saved_storages if self._written.get(at) is not None)
        self._mark_opaque()

    def geometry(self, value: int) -> Geometry:
        """Storage, offset, sizes, strides and type of a value."""
        return self.values[value]

    def storage(self, content: int) -> Storage:
        """Origin, bytes, maker and device type of a content's storage."""
        return self.storages[self.contents[content].storage]

    def _make(self, storage: int, writer: int) -> int:
        version = 0 if self._now[storage] < 0 else self.contents[self._now[storage]].version + 1
        self._now[storage] = len(self.contents)
        self.contents.append(Content(storage, version, writer))
        return self._now[storage]

    def _read(self, words: Iterator[Any]) -> None:
        for word in words:
            if word is SAVED:
                saved = next(words)
                if saved is not HIDDEN:
                    if self._lacks_bytes(saved.value):
                        self._uninitialised.add(self.values[saved.value][0])
                    self.saved.append(self._use(saved.value))
                    storage, now = self.values[saved.value][0], len(self.steps)
                    self.saved_after[storage] = self.saved_after.get(storage, (now, now))[0], now
            else:
                self._step(word, words)

    def _use(self, value: int) -> ContentUse:
        return ContentUse(value, self._now[self.values[value][0]])

    def _step(self, operator: Any, words: Iterator[Any]) -> None:
        number = len(self.steps)
        args, kwargs = self._arguments(words)
        step = TapeStep(number, operator, tuple(args), kwargs, None, (), ())
        writes = _written_by(operator, args, kwargs)
        fills = [use for use in _overwritten_by(operator, args, kwargs) if isinstance(use, ContentUse)]
        reads: list[int] = []
        lacking: set[int] = set()
        if not getattr(operator, "reads_shapes", False):
            skipped = list(fills)
            for use in uses_in((args, kwargs)):
                if use not in skipped:
                    if self._lacks_bytes(use.value):
                        lacking.add(self.values[use.value][0])
                    reads.append(use.content)
                    continue
                skipped.remove(use)
                if not self._covers(use.value):
                    reads.append(use.content)  # for the bytes that it does not write
        makes: list[int] = []
        changed = {self.contents[use.content].storage for use in writes if isinstance(use, ContentUse)}
        for storage in sorted(changed):
            makes.append(self._make(storage, number))
        for use in fills:
            self._wrote(use.value)
        step.out = self._result(words, number, makes)
        step.reads = tuple(dict.fromkeys(reads)) if makes else ()
        step.makes = tuple(makes)
        if getattr(operator, "allocates", False):
            for content in makes:
                self._written[self.contents[content].storage] = []
        if makes:  # a view reads nothing
            self._uninitialised |= lacking
            step.opaque = self._why_opaque(step, changed)
        self.steps.append(step)

    def _arguments(self, words: Iterator[Any]) -> tuple[list[Any], dict[str, Any]]:
        args: list[Any] = []
        kwargs: dict[str, Any] = {}
        for word in words:
            if word is OUTPUTS:
                return args, kwargs
            if word is NAMED:
                name = next(words)
                kwargs[name] = self._argument(next(words), words)
            else:
                args.append(self._argument(word, words))
        raise AssertionError("a log that ends within an operator")

    def _argument(self, word: Any, words: Iterator[Any]) -> Any:
        if type(word) is Ref:
            return self._use(word.value)
        if word is TRUE or word is FALSE:
            return word is TRUE
        if word is LIST:
            return [self._argument(next(words), words) for _ in range(next(words))]
        if word is CARRIED:
            next(words)
            self._carried += 1
            return Carried(self._carried - 1)
        return Hidden() if word is HIDDEN else word

    _carried = 0

    def _result(self, words: Iterator[Any], number: int, makes: list[int]) -> Any:
        word = next(words)
        if type(word) is Ref:
            storage = self.values[word.value][0]
            if self._now[storage] < 0:
                makes.append(self._make(storage, number))
            return self._use(word.value)
        if word is LIST:
            return [self._result(words, number, makes) for _ in range(next(words))]
        return Hidden() if word in (HIDDEN, OTHER) else word

    # Memory that was allocated and not written.

    def _covers(self, value: int) -> bool:
        """True if a value has each element of its storage once: strides may overlap, and miss others."""
        storage, _, size, stride, dtype = self.values[value]
        dense = 1
        for far, count in sorted((far, count) for far, count in zip(stride, size, strict=True) if count != 1):
            if far != dense:
                return False
            dense *= count
        return dense * dtype.itemsize == self.storages[storage][1]

    def _region(self, value: int) -> Region | None:
        storage, offset, size, stride, dtype = self.values[value]
        item = dtype.itemsize
        return region_of(
            self.storages[storage][1], offset * item, tuple(size), tuple(far * item for far in stride), item
        )

    def _wrote(self, value: int) -> None:
        storage = self.values[value][0]
        regions = self._written.get(storage)
        region = None if regions is None else self._region(value)
        if regions is not None and region is not None:
            regions.append(region)
            if covers(regions, _WHOLE):
                self._written[storage] = None

    def _lacks_bytes(self, value: int) -> bool:
        """True if some byte of a value was not seen to be written."""
        regions = self._written.get(self.values[value][0])
        if regions is None or 0 in self.values[value][2]:
            return False
        region = self._region(value)
        return region is None or not covers(regions, region)

    # What is never repeated.

    def _why_opaque(self, step: TapeStep, changed: set[int]) -> str | None:
        operator = step.operator
        if isinstance(operator, Function):
            return None if operator.repeats else "its results are kept, as declared"
        if not operator.is_overload:
            return "it is a function of higher order"
        if operator.is_random and not (operator.is_attention and _drops_nothing(step)):
            return "it draws random numbers"
        if operator.is_apart:
            return "it ran at another matmul precision than the layer began with"
        if not operator.is_known and not operator.awaits:
            return "it is not of torch's own operators"
        name = operator.func.overloadpacket.__name__
        if "batch_norm" in name or "_rnn" in name:
            self.opaque.update(self._statistics(step))
            return "it has a state of its own"
        if name in _RESIZE:
            self.opaque |= changed
            return "it changes the size of memory"
        if any(isinstance(leaf, Hidden) for leaf in _leaves((step.args, step.kwargs, step.out))):
            return "it works with a tensor that its memory does not describe"
        if operator.func.namespace == "c10d":
            return "it is a collective in place"
        return None

    def _statistics(self, step: TapeStep) -> Iterator[int]:
        """Storages of running statistics that a batch norm in training writes into, which not every schema says."""
        named = dict(zip((each.name for each in step.operator.func._schema.arguments), step.args, strict=False))
        for value in (named.get("running_mean"), named.get("running_var")):
            if isinstance(value, ContentUse) and named.get("training", True):
                yield self.values[value.value][0]

    def _mark_opaque(self) -> None:
        """Extends opacity from storages to the steps that touch them, and to allocations that nothing filled."""
        for content in self.contents:
            if content.writer >= 0 and self.storages[content.storage][0] is not Origin.MADE:
                self.opaque.add(content.storage)  # the layer writes into what is not its own
        for step in self.steps:
            if not step.makes or step.opaque is not None:
                continue
            touched = {self.contents[content].storage for content in (*step.reads, *step.makes)}
            if touched & self.opaque:
                step.opaque = "something else writes into what it works with"
            elif getattr(step.operator, "allocates", False) and touched & self._uninitialised:
                step.opaque = "it allocates memory that nothing seen fills"


def _drops_nothing(step: TapeStep) -> bool:
    """True for attention without dropout."""
    drops = drops_by(step.operator.func)
    if drops is None:
        return False  # it draws for another reason
    position, name, default, nothing = drops
    given = step.args[position] if position < len(step.args) else step.kwargs.get(name)
    return (default if given is None else given) == nothing


def _leaves(value: Any) -> list[Any]:
    found: list[Any] = []
    _collect(value, found)
    return found


def _collect(value: Any, found: list[Any]) -> None:
    if isinstance(value, (list, tuple)):
        for item in value:
            _collect(item, found)
    elif isinstance(value, dict):
        for item in value.values():
            _collect(item, found)
    else:
        found.append(value)


def uses_in(value: Any) -> list[ContentUse]:
    """The tensors among arguments or results, in order."""
    return [leaf for leaf in _leaves(value) if isinstance(leaf, ContentUse)]


def _named(wanted: Sequence[tuple[int, str]], args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    return [
        leaf
        for position, name in wanted
        for leaf in _leaves(args[position] if position < len(args) else kwargs.get(name))
    ]


def _written_by(operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    if isinstance(operator, Function):
        return []
    if operator.awaits:
        return _leaves(args[0])  # what a collective gives is there only now
    if operator.is_overload and operator.func.namespace == "c10d":
        return _leaves(args)  # its schema does not say which; none is repeated
    return _named(operator.writes, args, kwargs)


def _overwritten_by(operator: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Any]:
    return [] if isinstance(operator, Function) else _named(operator.overwrites, args, kwargs)
