"""Prover of the token axis: follows one forward of a layer and proves which saved tensors can be recomputed by tokens.

`TokenAxisProver` is a dispatch mode under which the layer runs once, whole and unchanged. It carries the token axis
through every operator (axis.operator_rules) and keeps the results of those that are never repeated: attention, which
needs all tokens, and random numbers, which would come out different. The first thing it cannot prove ends it; from
then on it only passes calls on, and `reason` says why.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

import torch
from torch.nn import Parameter

from memo.swap.engine.saved_storage import Content, content_of
from memo.swap.recompute.axis.argument_axes import TokenDims
from memo.swap.recompute.axis.operator_rules import Call, Unproven, meaning_of, tensors_in
from memo.swap.recompute.axis.operators import Given, Operator
from memo.swap.recompute.axis.token_axis import MIXED, SAME, Axis, Described, Mark, Meaning, TokenMap
from memo.swap.recompute.record.dispatch_mode import Aside, SleepingMode
from memo.swap.recompute.record.filled import Filled
from memo.swap.recompute.record.kept_results import Reader, Result
from memo.swap.recompute.record.layer_arguments import argument_tensors
from memo.swap.recompute.record.memoized import Answer, AttentionAnswer, FunctionAnswer, RandomAnswer
from memo.swap.recompute.record.operator_log import Script
from memo.swap.recompute.record.provenance import made_by_compiler
from memo.swap.recompute.record.token_local_functions import TokenLocalCall
from memo.swap.storage_map import StorageMap
from memo.swap.tensor_kinds import has_hidden_state, local_part

__all__ = ["Slot", "TokenAxisProver"]

_MEANINGS: dict[tuple[Any, ...], Meaning] = {}
"""An operator, the number of tokens, what the call is given and what is known of that -> what its results mean."""
_MOST_MEANINGS = 10_000  # a run over ever new sequence lengths must not remember them all


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One tensor that autograd saved, in the order of saving."""

    given: torch.Tensor
    """A detached alias."""
    tensor: torch.Tensor
    """This rank's part: its geometry, and its storage while the forward lasts."""
    meaning: Meaning
    content: Content


class TokenAxisProver(SleepingMode):
    """Dispatch mode around one layer call; `ends` are the last tokens, exclusive, at SAVE_ALL and at SAVE_MATMULS."""

    def __init__(
        self,
        hidden: torch.Tensor,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        *,
        dims: TokenDims,
        ends: tuple[int, int],
        script: Script,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.reason: str | None = None
        self.slots: list[Slot] = []
        self.answers: list[Answer] = []
        self.results: list[Result] = []
        """Of matrix products, token-local functions and collectives."""
        self.ends = ends
        self.script = script
        self.tokens = TokenMap(hidden.size(-2))
        self._dims = dims
        self._filled = Filled()
        # Storages that stay whole though tokens are mixed in them: attention is never repeated, so neither are these.
        self.whole: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._inputs: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._made = StorageMap(brief=True)
        """Storage -> the Result that it is."""
        self._paused = False
        self.joined: set[int] = set()
        """How many shards of tokens lie one after the other in what the layer gathers from other ranks."""
        self._arguments = argument_tensors(args, kwargs)
        for position, tensor in enumerate(self._arguments):
            self._inputs.add(tensor.untyped_storage())
            self.tokens.put(tensor, dims.meaning(position, tensor))
        self.tokens.put(hidden, Axis(dim=hidden.ndim - 2))
        self._mixed_by: str | None = None

    def called(self, given: Given) -> Any:
        """Runs an operator, logs it and carries the token axis through it."""
        origin = self.script.calls(given)
        silent = self.reason is not None or self._paused
        out = given.call() if silent else self._noted(given)
        self.script.makes(out, origin)
        return out

    def _noted(self, given: Given) -> Any:
        """Calls an operator that the proof must understand."""
        before: list[Described] = []
        changed: list[torch.Tensor] = []
        try:
            before = self._before(given)
            if given.operator.writes:
                changed = self._changed(given)
        except Unproven as unproven:
            self.reason = str(unproven)
        out = given.call()
        if self.reason is None:
            try:
                self._after(given, before, changed, out)
            except Unproven as unproven:
                self.reason = str(unproven)
        return out

    def _before(self, given: Given) -> list[Described]:
        """Token axes of the arguments. Raises Unproven for an operator that a recompute must not repeat."""
        func = given.operator.func
        if not given.operator.is_overload:
            raise Unproven(f"{func} is not known to work token by token")
        before = []
        for tensor in given.tensors:
            if not _is_understood(tensor):
                raise Unproven(f"{func.overloadpacket} works on a {type(tensor).__name__}")
            described = self.tokens.described(tensor)
            if described[1] is SAME and tensor not in self.tokens and made_by_compiler(tensor):
                raise Unproven("a function in it is compiled, and a part of the tokens may be fused in another way")
            before.append(described)
        if not given.operator.is_known:
            raise Unproven(f"{func.overloadpacket} is not known to work token by token")
        return before

    def _changed(self, given: Given) -> list[torch.Tensor]:
        """The tensors that the call will change in place. Raises Unproven where a recompute must not change them again."""
        changed = given.changed()
        for tensor in changed:
            storage = tensor.untyped_storage()
            if tensor not in self.tokens or storage in self._inputs:
                raise Unproven(
                    f"{given.operator.func.overloadpacket} changes something from outside the layer in place"
                )
            if storage in self.whole:
                raise Unproven(
                    f"{given.operator.func.overloadpacket} changes a result in place that is not computed again"
                )
            self._read([tensor])
            for result in self.results:
                result.before_change_of(storage)
        return changed

    def _after(self, given: Given, before: list[Described], changed: list[torch.Tensor], out: Any) -> None:
        """Carries the token axis to the results of a call."""
        operator, results = given.operator, tensors_in(out)
        storages = [tensor.untyped_storage() for tensor in given.tensors]
        is_result = operator.is_product or operator.is_collective or (operator.joins and self._rearranges(given))
        is_view = _is_view(operator, storages, results)
        if not is_result and not is_view:
            self._read(given.tensors)
        self._fill(given, results, is_view=is_view)
        if operator.is_attention:
            self._attention(self._call(given, out))
            return
        meaning: Meaning
        if operator.is_random:
            call = self._call(given, out)
            self.answers.append(RandomAnswer.of(call, first=self.ends[0]))
            meaning = call.meaning(call.args[0])
        else:
            meaning = self._meaning(given, before, out)
            if meaning is MIXED and self._mixed_by is None and all(known is not MIXED for _, known in before):
                self._mixed_by = str(operator.func.overloadpacket)
        if is_result:
            function = None if operator.is_product else operator.func
            self._result(out, meaning, given.tensors, function=function)
            if function is not None and isinstance(meaning, Axis):
                self._join(meaning.outer)
        for tensor in changed:
            if meaning is MIXED or self.tokens.of(tensor) != meaning:  # mixed here may be tokens in the whole
                self.tokens.spoil(tensor)
                return
        for tensor in results:
            outside = tensor.untyped_storage() in storages and tensor not in self.tokens  # a view of a parameter
            if not outside:
                self.tokens.put(tensor, meaning)

    def _fill(self, given: Given, results: Sequence[torch.Tensor], *, is_view: bool) -> None:
        """Raises Unproven for a call that reads memory which no operator was seen to fill."""
        unfilled = None if is_view else self._unfilled(given.operator.func.overloadpacket, given.read())
        if unfilled is not None:
            raise Unproven(unfilled)
        for tensor in given.overwritten():
            self._filled.wrote(tensor)
        if given.operator.allocates:
            for tensor in results:
                self._filled.allocated(tensor)

    def _unfilled(self, reader: object, given: Sequence[torch.Tensor]) -> str | None:
        """Reason why these tensors must not be read; None where operators filled all of them."""
        if not any(map(self._filled.lacks, given)):
            return None
        return (
            f"{reader} reads memory that no operator filled; if a kernel that torch does not see fills it, mark the function"
            " that calls it with memo.memoize"
        )

    def _meaning(self, given: Given, before: list[Described], out: Any) -> Meaning:
        """Axes of the results by operator_rules, cached over calls of equal shapes and axes."""
        alike = (given.operator, self.tokens.tokens, *given.others, *before)
        meaning = _MEANINGS.get(alike)
        if meaning is None:
            meaning = meaning_of(self._call(given, out))
            if not given.operator.writes:  # it may lie in another way after the call
                if len(_MEANINGS) >= _MOST_MEANINGS:
                    _MEANINGS.clear()
                _MEANINGS[alike] = meaning
        return meaning

    def _call(self, given: Given, out: Any) -> Call:
        return Call(
            func=given.operator.func,
            args=given.args,
            kwargs=given.kwargs,
            out=out,
            tokens=self.tokens,
            given=given.tensors,
        )

    def _rearranges(self, given: Given) -> bool:
        """True for a join that only reorders parts of one result.

        Such joins surround a collective over another dimension than the first.
        """
        storages = {tensor.untyped_storage() for tensor in given.tensors}
        return len(storages) == 1 and self._made.find(ref(storages.pop())) is not None

    def _result(
        self,
        out: torch.Tensor,
        meaning: Meaning,
        given: Sequence[torch.Tensor],
        *,
        function: Callable[..., Any] | None = None,
    ) -> None:
        """Records the result of a product, or of a `function` of the first of its arguments."""
        result = Result(
            out,
            meaning if isinstance(meaning, Axis) else None,
            position=len(self.slots),
            span=self.ends,
            tokens=self.tokens.tokens,
            line=len(self.script.lines),
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

    def _attention(self, call: Call) -> None:
        tensors, results = call.given, tensors_in(call.out)
        axis = call.meaning(tensors[0])
        if axis is Mark.MIXED:
            raise Unproven(f"{self.mixes} before they come to attention")
        if not isinstance(axis, Axis) or results[0].size(axis.dim) != axis.length(self.tokens.tokens):
            raise Unproven(f"{call.func.overloadpacket} is given queries that do not run over the layer's tokens")
        self.answers.append(AttentionAnswer(call.func, call.out, axis))
        for tensor in (*tensors[3:], *results):
            self.whole.add(tensor.untyped_storage())
        for result in results[1:]:
            self.tokens.put(result, Mark.MIXED)
        self.tokens.put(results[0], axis)

    def memoized(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], token_dim: int | None
    ) -> Any:
        """Runs a memoized function as one operator, whose results are kept whole."""
        given = tensors_in((args, kwargs))
        if self.reason is None and not all(map(_is_understood, given)):
            self.reason = "a memoized function works on a sharded tensor, or on one of another kind of its own"
        versions = [tensor._version for tensor in given]
        with Aside(self):
            for tensor in given:
                self.save(tensor)
        paused, self._paused = self._paused, True
        self.script.begins(function)
        try:
            out = function(*args, **kwargs)
        finally:
            self._paused = paused
        self.script.ends(function, out)
        if self.reason is None and not paused:
            if versions != [tensor._version for tensor in given]:
                self.reason = "a memoized function changes its arguments in place"
            storages = {tensor.untyped_storage() for tensor in given}
            results = tensors_in(out)
            if any(result.untyped_storage() in storages for result in results):
                self.reason = "a memoized function returns a view of its arguments"
            try:
                axes = [_axis_of_result(result, self.tokens.tokens, token_dim) for result in results]
            except Unproven as unproven:
                self.reason = str(unproven)
                return out
            self.answers.append(FunctionAnswer(function, out, axes))
            for result, axis in zip(results, axes, strict=True):
                self.tokens.put(result, axis or Mark.SAME)
                self.whole.add(result.untyped_storage())
        return out

    def token_local(self, call: TokenLocalCall) -> torch.Tensor:
        """Runs a token-local function as one operator."""
        if self.asleep:
            return call.run()
        saved = len(self.slots)
        given = tensors_in((call.x, call.others))
        if self.reason is None and not all(map(_is_understood, given)):
            self.reason = f"{call} works on a sharded tensor, or on one of another kind of its own"
        origin = self.script.line(str(call), given=given)
        with Aside(self):
            out = call.run()
        self.script.makes(out, origin)
        if self.reason is None and not self._paused:
            self.reason = self._unfilled(call, given)
            meaning = self.tokens.of(call.x)
            if isinstance(meaning, Axis):
                alike = all(self.tokens.of(tensor) is Mark.SAME for tensor in given[1:])
                meaning = (call.after(meaning) if alike else None) or Mark.MIXED
                if isinstance(meaning, Axis):
                    self._join(meaning.outer)
                elif self._mixed_by is None:
                    self._mixed_by = str(call)
            self.tokens.put(out, meaning)
            with Aside(self):
                # One that saves something runs again, for what comes after it to be in its place.
                meaning = self.tokens.of(out) if saved == len(self.slots) else Mark.MIXED
                self._result(out, meaning, given, function=call.function)
        return out

    def _join(self, shards: int) -> None:
        """Arguments as long as the tokens of so many shards run over them, as what was gathered does."""
        if shards == 1 or shards in self.joined:
            return
        self.joined.add(shards)
        for position, tensor in enumerate(self._arguments):
            if self.tokens.of(tensor) is Mark.SAME:
                self.tokens.put(tensor, self._dims.meaning(position, tensor, (shards,)))

    def save(self, tensor: torch.Tensor) -> None:
        """Records a tensor that autograd saves, with its token axis."""
        if self.reason is not None or self._paused:
            return
        local = local_part(tensor)
        if not _is_understood(local):
            self.reason = f"a {type(local).__name__} is saved"
            return
        self.reason = self._unfilled("autograd", [local])
        if self.reason is not None:
            return
        self._read([local])
        given = tensor.detach()
        self.slots.append(
            Slot(given=given, tensor=local_part(given), meaning=self.tokens.of(local), content=content_of(tensor))
        )

    def is_outside(self, tensor: torch.Tensor) -> bool:
        """True for arguments, parameters and other tensors that the forward did not make."""
        return tensor not in self.tokens or tensor.untyped_storage() in self._inputs

    @property
    def mixes(self) -> str:
        """Message that names the operator which mixed tokens."""
        return f"{self._mixed_by or 'an operator'} mixes tokens"


def _is_view(operator: Operator, storages: Sequence[torch.UntypedStorage], results: Sequence[torch.Tensor]) -> bool:
    """True for a call that returns views only and reads no elements."""
    if operator.writes or not results:
        return False
    first = results[0].untyped_storage()
    for storage in storages:
        if storage is not first:
            return False
    return len(results) == 1 or all(result.untyped_storage() is first for result in results)


def _is_understood(tensor: torch.Tensor) -> bool:
    """A tensor whose bytes, shape and strides are all there is to it."""
    plain = type(tensor) in (torch.Tensor, Parameter) and tensor.layout is torch.strided
    return plain and not has_hidden_state(tensor)


def _axis_of_result(result: torch.Tensor, tokens: int, token_dim: int | None) -> Axis | None:
    """Token axis of a memoized result: `token_dim`, else the dimension as long as the tokens (of several the last but one).

    None for a result without tokens.
    """
    if token_dim is not None:
        dim = token_dim % max(result.ndim, 1)
        fits = dim < result.ndim and result.size(dim) % tokens == 0
        return Axis(dim=dim, outer=result.size(dim) // tokens) if fits else None
    dims = [dim for dim, size in enumerate(result.size()) if size == tokens]
    if len(dims) > 1 and result.ndim - 2 not in dims:
        raise Unproven("a memoized function's result has several dimensions as long as the tokens; give token_dim")
    return Axis(dim=result.ndim - 2 if len(dims) > 1 else dims[0]) if dims else None
