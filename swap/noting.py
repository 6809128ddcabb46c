"""Watches one forward of one layer: what it saves, what must not be computed twice, and whether tokens stay apart.

`Noting` is a dispatch mode under which the layer runs once, whole and unchanged. It carries the token axis through every
operator (tokenrules) and has what is never repeated kept (keeping). The first thing it cannot prove ends it; from then on
it only passes calls on, and `reason` says why.

Layers and steps repeat, so a forward is first held to a precedent (following): what that one did is proven already.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from memo.swap.answers import FunctionAnswer, mask_axis
from memo.swap.arguments import argument_tensors
from memo.swap.aside import Aside, SleepingMode
from memo.swap.called import Form, Given, Operator
from memo.swap.capture import is_understood, local_part
from memo.swap.following import Following
from memo.swap.keeping import Keeping
from memo.swap.marked import Marked
from memo.swap.origins import made_by_compiler
from memo.swap.precedent import Precedent, Proof, Recording, Step, Storages
from memo.swap.script import Script
from memo.swap.tokendims import TokenDims
from memo.swap.tokenrules import Call, Unproven, meaning_of, tensors_in
from memo.swap.tokens import MIXED, SAME, Axis, Described, Mark, Meaning, TokenMap

__all__ = ["Noting"]

_MEANINGS: dict[tuple[Any, ...], Meaning] = {}
"""An operator, the number of tokens, what the call is given and what is known of that -> what its results mean."""
_MOST_MEANINGS = 10_000  # a run over ever new sequence lengths must not remember them all


class Noting(SleepingMode):
    """One layer call under way. `ends` says where the tokens at level ALL and those at level MATMULS end."""

    def __init__(
        self,
        hidden: torch.Tensor,
        args: Sequence[Any],
        kwargs: dict[str, Any],
        *,
        dims: TokenDims,
        ends: tuple[int, int],
        script: Script,
        precedent: Precedent | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.precedent: Precedent | None = None
        """Of a forward that is over and was proven anew, for later ones."""
        self.reason: str | None = None
        self.ends = ends
        self.script = script
        self.tokens = TokenMap(hidden.size(-2))
        self.kept = Keeping(ends=ends, tokens=hidden.size(-2))
        self._dims = dims
        self._inputs: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._paused = False
        self.joined: set[int] = set()
        """How many shards of tokens lie one after the other in what the layer gathers from other ranks."""
        self._arguments = argument_tensors(args, kwargs)
        for position, tensor in enumerate(self._arguments):
            self._inputs.add(tensor.untyped_storage())
            self.tokens.put(tensor, dims.meaning(position, tensor))
        self.tokens.put(hidden, Axis(dim=hidden.ndim - 2))
        self._mixed_by: str | None = None
        storages = Storages(self._arguments)
        given = tuple([(storages.number(tensor), self.tokens.described(tensor)) for tensor in self._arguments])
        self._following: Following | None = None
        self._recording: Recording | None = None
        if precedent is not None and precedent.given == given:
            self._following = Following(precedent, storages, script)
        else:
            self._recording = Recording(given, storages, script)

    def dispatched(self, func: torch._ops.OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._following is not None:
            known = self._following.calls(func, args, kwargs)
            if known is not None:
                return self._again(self._following, *known, args, kwargs)
            self._leave()
        return super().dispatched(func, args, kwargs)

    def called(self, given: Given) -> Any:
        return self._anew(given, given.call)

    def _again(
        self,
        following: Following,
        step: Step,
        tensors: Sequence[torch.Tensor],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> Any:
        """Calls an operator of which all is known, but what it will give."""
        operator = step.form.operator
        if operator.writes:
            self.kept.changes(operator.changed(args, kwargs))
        out = operator.func(*args, **kwargs)
        if following.made(step, out):
            self.kept.call(operator, tensors, out, step.proof)
            return out
        self._leave()
        if operator.writes:
            self.reason = f"{operator.func.overloadpacket} changes something in place in another way than before"
        return self._anew(Given(operator.func, args, kwargs), lambda: out)

    def _anew(self, given: Given, call: Callable[[], Any]) -> Any:
        """Calls an operator that has to be proven."""
        recording = self._recording
        if recording is not None:
            recording.begins(self._mixed_by)
        origin = self.script.calls(given)
        silent = self.reason is not None or self._paused
        out, proof = (call(), None) if silent else self._noted(given, call)
        self.script.makes(out, origin)
        if recording is not None and proof is not None:
            recording.step(Form(given), given.tensors, proof, out, self.tokens)
        return out

    def _leave(self) -> None:
        """The forward does something else than its precedent did."""
        if self._following is not None:
            self._recording, self._mixed_by = self._following.leave(self.tokens)
            self._following = None

    def ended(self) -> None:
        """The forward is over, or was broken off."""
        following = self._following
        if following is not None and following.ends():
            self._mixed_by = following.mixed_by
        else:
            self._leave()
        if self._recording is not None and self.reason is None and self.script.reason is None:
            self.precedent = self._recording.ends(self._mixed_by)

    def _noted(self, given: Given, call: Callable[[], Any]) -> tuple[Any, Proof | None]:
        """Calls an operator that the proof must understand."""
        before: list[Described] = []
        changed: list[torch.Tensor] = []
        try:
            before = self._before(given)
            if given.operator.writes:
                changed = self._changed(given)
        except Unproven as unproven:
            self.reason = str(unproven)
        out, proof = call(), None
        if self.reason is None:
            try:
                proof = self._after(given, before, changed, out)
            except Unproven as unproven:
                self.reason = str(unproven)
        return out, proof

    def _before(self, given: Given) -> list[Described]:
        """What is known of the tensors that the call is given. Raises Unproven for what a recompute must not do again."""
        func = given.operator.func
        if not given.operator.is_overload:
            raise Unproven(f"{func} is not known to work token by token")
        before = []
        for tensor in given.tensors:
            if not is_understood(tensor):
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
            if storage in self.kept.whole:
                raise Unproven(
                    f"{given.operator.func.overloadpacket} changes a result in place that is not computed again"
                )
        self.kept.changes(changed)
        return changed

    def _after(self, given: Given, before: list[Described], changed: list[torch.Tensor], out: Any) -> Proof:
        """The call has returned."""
        operator, results = given.operator, tensors_in(out)
        storages = [tensor.untyped_storage() for tensor in given.tensors]
        is_result = operator.is_product or operator.is_collective or (operator.joins and self.kept.rearranges(given))
        uses = not is_result and not _is_view(operator, storages, results)
        meaning: Meaning
        if operator.is_attention:
            meaning = self._axis_of_attention(self._call(given, out))
        elif operator.is_random:
            meaning = mask_axis(self._call(given, out))
        else:
            meaning = self._meaning(given, before, out)
            if meaning is MIXED and self._mixed_by is None and all(known is not MIXED for _, known in before):
                self._mixed_by = str(operator.func.overloadpacket)
        proof = Proof(meaning=meaning, uses=uses, is_result=is_result, line=len(self.script.lines))
        self.kept.call(operator, given.tensors, out, proof)
        if operator.is_collective:
            self._has_no_precedent()
        if is_result and not operator.is_product and isinstance(meaning, Axis):
            self._join(meaning.outer)
        for tensor in changed:
            if meaning is MIXED or self.tokens.of(tensor) != meaning:  # mixed here may be tokens in the whole
                self.tokens.spoil(tensor)
                self._recording = None
                return proof
        for number, tensor in enumerate(results):
            outside = tensor.untyped_storage() in storages and tensor not in self.tokens  # a view of a parameter
            if not outside:
                # What attention gives besides its first result is autograd's alone.
                self.tokens.put(tensor, MIXED if operator.is_attention and number else meaning)
        return proof

    def _meaning(self, given: Given, before: list[Described], out: Any) -> Meaning:
        """By the rules for tokens, which are asked once for all calls that look alike: layers and steps repeat."""
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

    def _axis_of_attention(self, call: Call) -> Axis:
        axis = call.meaning(call.given[0])
        if axis is Mark.MIXED:
            raise Unproven(f"{self.mixes} before they come to attention")
        first = tensors_in(call.out)[0]
        if not isinstance(axis, Axis) or first.size(axis.dim) != axis.length(self.tokens.tokens):
            raise Unproven(f"{call.func.overloadpacket} is given queries that do not run over the layer's tokens")
        return axis

    def memoized(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], token_dim: int | None
    ) -> Any:
        """Runs a function that the user marked: as one operator, whose results are kept whole."""
        self._has_no_precedent()
        given = tensors_in((args, kwargs))
        if self.reason is None and not all(map(is_understood, given)):
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
            self.kept.answers.append(FunctionAnswer(function, out, axes))
            for result, axis in zip(results, axes, strict=True):
                self.tokens.put(result, axis or Mark.SAME)
                self.kept.whole.add(result.untyped_storage())
        return out

    def marked(self, call: Marked) -> torch.Tensor:
        """Runs a marked function, as one operator."""
        if self.asleep:
            return call.run()
        self._has_no_precedent()
        saved = len(self.kept.slots)
        given = tensors_in((call.x, call.others))
        if self.reason is None and not all(map(is_understood, given)):
            self.reason = f"{call} works on a sharded tensor, or on one of another kind of its own"
        origin = self.script.line(str(call), given=given)
        with Aside(self):
            out = call.run()
        self.script.makes(out, origin)
        if self.reason is None and not self._paused:
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
                meaning = self.tokens.of(out) if saved == len(self.kept.slots) else Mark.MIXED
                self.kept.result(out, meaning, given, line=len(self.script.lines), function=call.function)
        return out

    def _has_no_precedent(self) -> None:
        """Forwards with marked functions and with parts of what several ranks have are proven each time."""
        self._leave()
        self._recording = None

    def _join(self, shards: int) -> None:
        """Arguments as long as the tokens of so many shards run over them, as what was gathered does."""
        if shards == 1 or shards in self.joined:
            return
        self._has_no_precedent()
        self.joined.add(shards)
        for position, tensor in enumerate(self._arguments):
            if self.tokens.of(tensor) is Mark.SAME:
                self.tokens.put(tensor, self._dims.meaning(position, tensor, (shards,)))

    def save(self, tensor: torch.Tensor) -> None:
        """Autograd saves `tensor`."""
        if self.reason is not None or self._paused:
            return
        save = None if self._following is None else self._following.saves(tensor)
        if save is not None:
            self.kept.save(tensor, save.described[1], is_outside=save.is_outside)
            return
        self._leave()
        local = local_part(tensor)
        if not is_understood(local):
            self.reason = f"a {type(local).__name__} is saved"
            return
        if local is not tensor:
            self._has_no_precedent()
        described, is_outside = self.tokens.described(local), self._is_outside(local)
        if self._recording is not None:
            self._recording.save(local, described, is_outside=is_outside)
        self.kept.save(tensor, described[1], is_outside=is_outside)

    def _is_outside(self, tensor: torch.Tensor) -> bool:
        """True for what the layer was given, or has of its own."""
        return tensor not in self.tokens or tensor.untyped_storage() in self._inputs

    @property
    def mixes(self) -> str:
        return f"{self._mixed_by or 'an operator'} mixes tokens"


def _is_view(operator: Operator, storages: Sequence[torch.UntypedStorage], results: Sequence[torch.Tensor]) -> bool:
    """True for a call that only sees a tensor in another shape, and uses no number in it."""
    if operator.writes or not results:
        return False
    first = results[0].untyped_storage()
    for storage in storages:
        if storage is not first:
            return False
    return len(results) == 1 or all(result.untyped_storage() is first for result in results)


def _axis_of_result(result: torch.Tensor, tokens: int, token_dim: int | None) -> Axis | None:
    """Where the user said, or the dimension as long as the tokens, of several the last but one, where tokens usually are;
    None for a result that is about all of them."""
    if token_dim is not None:
        dim = token_dim % max(result.ndim, 1)
        fits = dim < result.ndim and result.size(dim) % tokens == 0
        return Axis(dim=dim, outer=result.size(dim) // tokens) if fits else None
    dims = [dim for dim, size in enumerate(result.size()) if size == tokens]
    if len(dims) > 1 and result.ndim - 2 not in dims:
        raise Unproven("a memoized function's result has several dimensions as long as the tokens; give token_dim")
    return Axis(dim=result.ndim - 2 if len(dims) > 1 else dims[0]) if dims else None
