"""Rows of a tape: how the storages of one layer call are divided by tokens, and which steps may run on a part of them.

The rules of operators (axis/operator_rules.py) carry the token axis from step to step, over stand-ins without bytes. A step
that no rule knows, or that mixes tokens, never runs on a part: what it makes is kept, or not divided. For what is kept any
axis is right, since parts of it are slices of what was computed; so a new one is taken there (`_Reader.guess`), and rules
hold for what follows. A wrong guess costs bytes and never a bit.

Where one operand runs over queries and another one over keys, as in attention written out, the step may run on a part of
the queries if all keys are there. The keys are then the same for all tokens from the step that makes them on: they are
never divided, and replayed as a whole or kept.

    content    Rows: bytes of each token in each row of its storage; or the same whatever tokens are computed; or neither
    value      the axis of a tensor, whose strides must agree with the Rows of what its storage holds
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from memo.errors import is_interruption
from memo.swap.engine.token_prefix import Rows
from memo.swap.recompute.axis.argument_axes import token_axes
from memo.swap.recompute.axis.operator_rules import TRIANGLES, Call, Unproven, meaning_of, tensors_in
from memo.swap.recompute.axis.token_axis import MIXED, SAME, Axis, Meaning, part_layout, rows_by_strides
from memo.swap.recompute.ranges.places import rounds_by_place
from memo.swap.recompute.tape.bans import is_cheap
from memo.swap.recompute.tape.log import Function, Geometry, Origin
from memo.swap.recompute.tape.tape import Carried, Hidden, Step, Tape, Use, uses_in
from memo.swap.token_levels import LEAST_TOKENS, tile_of

__all__ = ["TokenLayout", "TokenRows", "token_layout", "token_layouts"]

_SIZES_AT = {"empty": 0, "full": 0, "ones": 0, "zeros": 0, "new_empty": 1, "new_full": 1, "new_ones": 1, "new_zeros": 1}
"""Operators that make a tensor of a size and of no number of another one, and the position of that size."""

_PRODUCTS = frozenset({torch.ops.aten.bmm, torch.ops.aten.baddbmm})
"""Products of which the rows of the left factor may be tokens, while the right one runs over other tokens."""
_SELECTIONS = frozenset({torch.ops.aten.index_select})
"""Selections of which the first operand may run over tokens, while the second one counts others: keys by their numbers."""
_ELEMENTWISE = frozenset({torch.ops.aten.masked_fill, torch.ops.aten.masked_fill_})
"""Pointwise, though not tagged so."""


class TokenLayout(NamedTuple):
    """A way to read a tape's tokens."""

    dim: int
    """Dimension of the layer's input."""
    found_runs: bool
    """Memory that nothing seen has made runs over tokens, as what a compiled function made; else it is the same for all."""
    whole: frozenset[int] = frozenset()
    """Contents that are not divided."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TokenRows:
    """How one tape is divided by its tokens.

    Args:
        tape: of the call.
        tokens: tokens of one sequence.
        rows: content -> division of its storage.
        same: contents that are the same whatever tokens are computed.
        axes: (value, content) -> token axis.
        whole: contents that are not divided, though they run over tokens: some step needs all of them.
        mixes: step -> why it never runs on a part of the tokens.
        sized: step -> position of a size among its arguments, of a tensor with that axis.
        way: how it was read.
    """

    tape: Tape
    tokens: int
    rows: Mapping[int, Rows]
    same: frozenset[int]
    whole: frozenset[int]
    axes: Mapping[tuple[int, int], Axis]
    mixes: Mapping[int, str]
    sized: Mapping[int, tuple[int, Axis]]
    way: TokenLayout
    shifted: frozenset[int] = frozenset()
    """Steps that depend on the number of a token, as `tril`: their second argument is counted from the first token."""

    def geometry(self, value: int, content: int, count: int) -> Geometry:
        """Geometry of a value when `count` tokens are computed, over a storage of their own."""
        storage, offset, size, stride, dtype = self.tape.geometry(value)
        rows, axis = self.rows.get(content), self.axes.get((value, content))
        if rows is None or axis is None:
            return storage, offset, size, stride, dtype
        step = rows.width // dtype.itemsize
        lies = part_layout(offset, size, stride, step, axis=axis, count=count, tokens=self.tokens)
        return storage, lies.offset, torch.Size(lies.shape), lies.stride, dtype

    def divides(self, content: int) -> bool:
        """True for a content that is divided, and made by a step that may run on a part of the tokens."""
        return content in self.rows and self.tape.contents[content].writer not in self.mixes

    def nbytes(self, content: int, count: int) -> int:
        """Bytes of a content's storage when `count` tokens are computed."""
        rows = self.rows.get(content)
        return self.tape.storage(content)[1] if rows is None else rows.nbytes(count)

    def args_of(self, step: Step, count: int, first: int = 0) -> Sequence[Any]:
        """Arguments of a step when `count` tokens from `first` on are computed."""
        if step.number in self.shifted:
            diagonal = step.args[1] if len(step.args) > 1 else 0
            return [step.args[0], diagonal + first, *step.args[2:]]
        at = self.sized.get(step.number)
        if at is None:
            return step.args
        position, axis = at
        sizes = list(step.args[position])
        sizes[axis.dim] = axis.length(count)
        return [*step.args[:position], sizes, *step.args[position + 1 :]]


def token_layouts(tape: Tape, carried: Sequence[Any] = ()) -> Iterable[TokenRows]:
    """Ways to read a tape's tokens, the usual one first; each is right, and they differ in what they can divide.

    Batch first and sequence first, and of more dimensions than three each but the features.
    """
    if not tape.storages or tape.storages[0][0] is not Origin.INPUT:
        return
    size = tape.geometry(0)[2]
    dims = range(len(size) - 2, -1, -1)
    for dim in sorted(dims, key=lambda dim: size[dim] < LEAST_TOKENS + tile_of(0)):
        if size[dim] < LEAST_TOKENS + tile_of(0):
            continue
        for found_runs in (False, True) if any(birth is Origin.FOUND for birth, *_ in tape.storages) else (False,):
            reader = _Reader(tape, TokenLayout(dim, found_runs), carried)
            yield reader.read()
            whole: frozenset[int] = frozenset()
            while reader.needed > whole:
                whole = frozenset(reader.needed)
                reader = _Reader(tape, TokenLayout(dim, found_runs, whole), carried)
                rows = reader.read()
            if whole:
                yield rows


def token_layout(tape: Tape, way: TokenLayout, carried: Sequence[Any] = ()) -> TokenRows:
    """The reading of a tape in one way, which was found for another of its form."""
    return _Reader(tape, way, carried).read()


class _Reader:
    """Reads a tape once, in order; `of` is what the rules ask of a stand-in."""

    def __init__(self, tape: Tape, way: TokenLayout, carried: Sequence[Any]) -> None:
        dim, whole = way.dim, way.whole
        self._way = way
        size = tape.geometry(0)[2]
        self.tokens = size[dim]
        self._tape = tape
        self._carried = carried
        before, behind = math.prod(size[:dim]), math.prod(size[dim + 1 : -1])
        self._joined = [each for each in dict.fromkeys([(before, behind), (before, 1), (1, behind)]) if each != (1, 1)]
        """Sequences before and behind the tokens, with which one dimension may be joined."""
        self._whole = whole
        self.needed = set(whole)
        """And those that the first step besides has to read as a whole to run on a part of the other tokens."""
        self._stand_ins: dict[int, torch.Tensor] = {}
        self._values: dict[int, int] = {}  # identity of a stand-in -> its value
        self._now: list[dict[int, Meaning] | None] = [None] * len(tape.storages)  # None: the same for all tokens
        self._content = [-1] * len(tape.storages)
        self._rows: dict[int, Rows] = {}
        self._same: set[int] = set()
        self._axes: dict[tuple[int, int], Axis] = {}
        self._mixes: dict[int, str] = {}
        self._sized: dict[int, tuple[int, Axis]] = {}
        self._shifted: set[int] = set()
        self._begin(dim, found_runs=way.found_runs)

    def read(self) -> TokenRows:
        for step in self._tape.steps:
            self._step(step)
        for use in self._tape.saved:
            self._is_known(use)
        return TokenRows(
            tape=self._tape,
            tokens=self.tokens,
            rows=self._rows,
            same=frozenset(self._same),
            whole=self._whole,
            axes=self._axes,
            mixes=self._mixes,
            sized=self._sized,
            way=self._way,
            shifted=frozenset(self._shifted),
        )

    def _begin(self, dim: int, *, found_runs: bool) -> None:
        """What was there before the layer."""
        joined = {
            step.args[1]
            for step in self._tape.steps
            if step.name.endswith("all_gather_into_tensor") and len(step.args) > 1 and type(step.args[1]) is int
        }
        firsts = {geometry[0]: value for value, geometry in reversed(list(enumerate(self._tape.values)))}
        for content, known in enumerate(self._tape.contents):
            birth = self._tape.storages[known.storage][0]
            if known.version > 0 or birth is Origin.MADE:
                continue
            self._content[known.storage] = content
            value = firsts.get(known.storage)
            axis: Axis | None = None
            if value is not None and birth is Origin.INPUT:
                axis = Axis(dim=dim)
            elif value is not None and birth is Origin.GIVEN:
                axes = token_axes(self._tape.geometry(value)[2], self.tokens, joined=sorted(joined))
                axis = axes[0] if axes else None  # of a mask over pairs of tokens that of the queries
            elif value is not None and birth is Origin.FOUND and found_runs:
                axis = self.guess(value, ())
            if content in self._whole:
                axis = None
            if value is None or axis is None or not self._put(value, content, axis, begins=True):
                self._same.add(content)

    def stand_in(self, value: int) -> torch.Tensor:
        """A tensor without bytes that lies as the value does."""
        tensor = self._stand_ins.get(value)
        if tensor is None:
            _, offset, size, stride, dtype = self._tape.geometry(value)
            block = torch.empty(self._tape.storages[self._tape.geometry(value)[0]][1], dtype=torch.uint8, device="meta")
            tensor = torch.empty(0, dtype=dtype, device="meta").set_(block.untyped_storage(), offset, size, stride)
            self._stand_ins[value] = tensor
            self._values[id(tensor)] = value
        return tensor

    def of(self, tensor: torch.Tensor) -> Meaning:
        """What is known of a stand-in now."""
        value = self._values[id(tensor)]
        storage = self._tape.geometry(value)[0]
        return self._meaning(value, self._content[storage])

    def _meaning(self, value: int, content: int) -> Meaning:
        if content in self._same:
            return SAME
        return self._axes.get((value, content), MIXED)

    def _is_known(self, use: Use) -> bool:
        """True for the axis of a value over a content that is divided; one that its strides tell is noted."""
        if (use.value, use.content) in self._axes:
            return True
        return use.content in self._rows and any(
            self._put(use.value, use.content, axis) for axis in self._candidates(use.value)
        )

    def _put(self, value: int, content: int, axis: Axis, *, begins: bool = False) -> bool:
        """Notes the axis of a value; False where its strides do not agree with the division of what its storage holds."""
        storage, offset, size, stride, dtype = self._tape.geometry(value)
        if axis.dim >= len(size) or size[axis.dim] != axis.length(self.tokens):
            return False
        nbytes = self._tape.storages[storage][1]
        rows = rows_by_strides(offset, size, stride, dtype.itemsize, nbytes, axis=axis, tokens=self.tokens)
        if rows is None or (not begins and self._rows.get(content, rows) != rows):
            return False
        self._rows[content] = rows
        self._axes[value, content] = axis
        return True

    def _candidates(self, value: int) -> Iterable[Axis]:
        """Axes that a tensor of that size may have, the likelier first."""
        size = self._tape.geometry(value)[2]
        dims = [dim for dim, length in enumerate(size) if length == self.tokens]
        if len(dims) > 1 and dims[-1] == len(size) - 1:
            dims = [dims[-2], dims[-1], *dims[:-2]]  # features as many as tokens, or pairs of tokens: queries first
        elif len(dims) > 1:
            dims = dims[::-1]
        yield from (Axis(dim=dim) for dim in dims)
        for outer, inner in self._joined:
            joined = (Axis(dim=dim, outer=outer, inner=inner) for dim in range(len(size)))
            yield from (axis for axis in joined if size[axis.dim] == axis.length(self.tokens))

    def guess(self, value: int, like: Sequence[Axis]) -> Axis | None:
        """An axis for something that is kept; any is right."""
        storage, offset, size, stride, dtype = self._tape.geometry(value)
        for axis in (*like, *self._candidates(value)):
            if axis.dim >= len(size) or size[axis.dim] != axis.length(self.tokens):
                continue
            nbytes = self._tape.storages[storage][1]
            if rows_by_strides(offset, size, stride, dtype.itemsize, nbytes, axis=axis, tokens=self.tokens) is not None:
                return axis
        return None

    def _step(self, step: Step) -> None:
        uses = uses_in((step.args, step.kwargs))
        for use in uses:
            self._is_known(use)
        self._find_needed(step)
        reason = None
        try:
            meaning = self._rule(step)
        except Unproven as unproven:
            meaning, reason = MIXED, str(unproven)
        except Exception as error:  # a rule for arguments of another kind
            if is_interruption(error):
                raise
            meaning, reason = MIXED, f"its rule failed ({type(error).__name__})"
        like = [axis for use in uses if isinstance(axis := self._meaning(use.value, use.content), Axis)]
        fresh = {content for content in step.makes if self._tape.contents[content].version == 0}
        changed = [content for content in step.makes if content not in fresh]
        if meaning is MIXED and step.makes:
            self._mixes[step.number] = reason or f"{step.name} mixes tokens"
        elif isinstance(meaning, Axis) and _packet(step) in TRIANGLES:
            self._shifted.add(step.number)
        if isinstance(meaning, Axis) and not self._whole.isdisjoint(step.makes):
            self._mixes[step.number] = "all tokens of its result are needed at once"
        for content in changed:
            self._change(step, content, meaning, uses, like)
        for content in fresh:
            self._content[self._tape.contents[content].storage] = content
        for use in uses_in(step.out):
            if use.content in fresh:
                self._make(use, meaning, like)
            elif isinstance(meaning, Axis):
                self._put(use.value, use.content, meaning)
            self._is_known(use)
        made = [self._rows[content] for content in step.makes if content in self._rows]
        if isinstance(meaning, Axis) and any(rounds_by_place(self._tape, step, rows, self.tokens) for rows in made):
            self._mixes.setdefault(step.number, "it rounds by place, and a part of its tokens has other ends")

    def _find_needed(self, step: Step) -> None:
        """Adds the operands that run over other tokens than the result of a step: over keys where it runs over queries."""
        if self.needed > self._whole:
            return  # what follows is read in another way then
        operator, uses = step.operator, uses_in((step.args, step.kwargs))
        if isinstance(operator, Function) or not operator.is_overload or len(made := uses_in(step.out)) != 1:
            return
        ndim = len(self._tape.geometry(made[0].value)[2])
        packet = operator.func.overloadpacket
        if packet in _SELECTIONS:
            if isinstance(self._meaning(uses[0].value, uses[0].content), Axis):
                self._need(uses[1:])
            return
        if packet in _PRODUCTS:
            if not is_cheap(step, self._tape):
                return
            candidates = uses[-2:-1]
        elif torch.Tag.pointwise in operator.func.tags or packet in _ELEMENTWISE:
            candidates = uses[:1] if operator.writes else uses
        else:
            return
        found = [axis for use in candidates if (axis := self._in_result(use, ndim)) is not None]
        queries = min(found, key=lambda axis: axis.dim, default=None)
        if queries is None or (packet in _PRODUCTS and queries.dim != 1):
            return
        running = {use.content for use in uses if self._in_result(use, ndim) == queries}
        self._need(use for use in uses if use.content not in running)

    def _need(self, uses: Iterable[Use]) -> None:
        for use in uses:
            if self._meaning(use.value, use.content) is SAME:
                continue
            if self._tape.storage(use.content)[0] is not Origin.INPUT:
                self.needed.add(use.content)

    def _in_result(self, use: Use, ndim: int) -> Axis | None:
        """The axis of an operand as a dimension of a result of so many dimensions, which broadcasts it."""
        axis = self._meaning(use.value, use.content)
        return axis.at(axis.dim - len(self._tape.geometry(use.value)[2]) + ndim) if isinstance(axis, Axis) else None

    def _make(self, use: Use, meaning: Meaning, like: Sequence[Axis]) -> None:
        """A result in new memory."""
        if meaning is SAME or use.content in self._whole:
            self._same.add(use.content)
            return
        axis = meaning if isinstance(meaning, Axis) else self.guess(use.value, like)
        if axis is not None:
            self._put(use.value, use.content, axis)

    def _change(self, step: Step, content: int, meaning: Meaning, uses: Sequence[Use], like: Sequence[Axis]) -> None:
        """A storage that the step writes into: divided as before, or anew."""
        storage = self._tape.contents[content].storage
        before, self._content[storage] = self._content[storage], content
        if content in self._whole:
            self._same.add(content)
            return
        targets = [use for use in uses if self._tape.geometry(use.value)[0] == storage]
        known = {self._meaning(use.value, before) for use in targets}
        if meaning is not MIXED and known == {meaning}:
            if meaning is SAME:
                self._same.add(content)
                return
            self._rows[content] = self._rows[before]
            for (value, at), axis in list(self._axes.items()):
                if at == before:
                    self._axes[value, content] = axis
            return
        self._mixes.setdefault(step.number, f"{step.name} writes tokens where others were")
        for use in targets:
            guessed = self.guess(use.value, like)
            if guessed is not None and self._put(use.value, content, guessed):
                return

    def _rule(self, step: Step) -> Meaning:
        """Token axis of all results of a step. Raises Unproven for one of which no rule is known."""
        operator = step.operator
        args, kwargs = self._real(step.args), self._real(step.kwargs)
        given = tensors_in((args, kwargs))
        if isinstance(operator, Function):
            return self._declared(operator, args, given)
        if not operator.is_overload:
            raise Unproven(f"{step.name} is a function of higher order")
        if operator.awaits:
            return self.of(args[0])
        position = _SIZES_AT.get(operator.func.overloadpacket.__name__)
        made = uses_in(step.out)
        if position is not None and len(made) == 1 and position < len(step.args):
            guessed = self.guess(made[0].value, ()) if isinstance(step.args[position], list) else None
            if guessed is None:
                return SAME
            self._sized[step.number] = position, guessed
            return guessed
        if not given and any(self.guess(use.value, ()) is not None for use in made):
            raise Unproven(f"{step.name} may count tokens")
        out = self._real(step.out)
        return meaning_of(Call(func=operator.func, args=args, kwargs=kwargs, out=out, tokens=self, given=given))

    def _declared(self, operator: Function, args: Sequence[Any], given: Sequence[torch.Tensor]) -> Meaning:
        """Meaning of a token-local function's results."""
        meanings = [self.of(tensor) for tensor in given]
        if operator.axis_after is None or not args:
            raise Unproven(f"{operator} is kept")
        if all(meaning is SAME for meaning in meanings):
            return SAME
        axis = meanings[0]
        if not isinstance(axis, Axis) or any(meaning is not SAME for meaning in meanings[1:]):
            return MIXED
        return operator.axis_after(axis, *args) or MIXED

    def _real(self, value: Any) -> Any:
        """Arguments or results with stand-ins in them."""
        if isinstance(value, Use):
            return self.stand_in(value.value)
        if isinstance(value, (list, tuple)):
            return [self._real(item) for item in value]
        if isinstance(value, dict):
            return {name: self._real(item) for name, item in value.items()}
        if isinstance(value, Carried):
            return self._carried[value.position] if value.position < len(self._carried) else 0.5
        return None if isinstance(value, Hidden) else value


def _packet(step: Step) -> Any:
    return getattr(getattr(step.operator, "func", None), "overloadpacket", None)
