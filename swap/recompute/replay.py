"""Replay: runs one call of a layer again in backward, for the saved tensors that no tier holds.

It owns the layer's arguments and the results that are reused. A replay runs the layer's own forward, whole or on the
tokens of one span, takes each saved tensor as autograd saves it, and stops after the last one that is wanted: the
projection after it is never computed.

A LayerCall repeats one span. The span at SAVE_MATMULS runs after that of the last tokens, since the results it reuses
lie in storages whose last tokens are recomputed, too; so it owns that other call, and the results. Nothing is owned in
the other direction: a graph that dies without backward frees itself.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from memo.errors import SwapError
from memo.swap.engine.stream_order import StreamOrder
from memo.swap.engine.token_prefix import Rows
from memo.swap.recompute.axis.operator_rules import tensors_in
from memo.swap.recompute.axis.operators import Given
from memo.swap.recompute.axis.token_axis import Axis, Layout, cut, rows_of
from memo.swap.recompute.guards.module_state import ModuleState
from memo.swap.recompute.guards.rng_and_autocast import Precision, RandomState
from memo.swap.recompute.level_costs import Costs, now_s
from memo.swap.recompute.record.dispatch_mode import Aside, SleepingMode
from memo.swap.recompute.record.keep_or_repeat import Treatment
from memo.swap.recompute.record.kept_results import Result
from memo.swap.recompute.record.layer_arguments import argument_tensors
from memo.swap.recompute.record.memoized import Answer
from memo.swap.recompute.record.operator_log import Diverged, Reading, Script, Scripted
from memo.swap.recompute.record.token_local_functions import TokenLocalCall
from memo.swap.tensor_kinds import local_part
from memo.swap.token_levels import Level

if TYPE_CHECKING:
    from memo.swap.engine.engine import Engine
    from memo.swap.engine.handles import Handle, Kept, Sharded
    from memo.swap.engine.saved_storage import Hold
    from memo.swap.recompute.checksums import Checksums
    from memo.swap.recompute.record.layer_arguments import Arguments

__all__ = ["LayerCall", "Span", "Take", "Wanted"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A saved tensor that is recomputed; `position` is its index among the tensors that autograd saves."""

    position: int
    hold: weakref.ref[Hold]
    """Of the saved storage; dead when backward is through with it."""
    axis: Axis | None
    """Where its tokens are; None where the layer runs again whole."""
    rows: Rows
    layout: Layout
    """How the recomputed tensor must lie in its storage."""
    dtype: torch.dtype


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The tokens from `first` to `stop`, which one replay computes again at one level."""

    first: int
    stop: int
    level: Level
    wanted: tuple[Wanted, ...]

    def is_filled(self) -> bool:
        """True when all that backward may still read of the span is in place already."""
        holds = (want.hold() for want in self.wanted)
        parts = (hold.saved.prefix for hold in holds if hold is not None and hold.saved.source is None)
        return not any(part.lacks(self.first) for part in parts if part is not None)


Take = Callable[[Span, Wanted, torch.Tensor], None]


class LayerCall:
    """One call of one layer and a span of its tokens to recompute, after that of `before`."""

    def __init__(
        self,
        engine: Engine,
        module: torch.nn.Module,
        name: str,
        *,
        hidden: Handle | Kept | Sharded,
        hidden_grad: bool,
        arguments: Arguments,
        state: ModuleState,
        precision: Precision,
        span: Span,
        tokens: int,
        costs: Costs,
        before: LayerCall | None = None,
        together: bool = False,
        answers: Sequence[Answer] = (),
        results: Sequence[tuple[Result, Treatment]] = (),
        script: Script,
        random: RandomState | None = None,
    ) -> None:
        self.name = name
        self.span = span
        self.before = before
        self.tokens = tokens
        self.engine = engine
        self.answers = answers
        self.results = results
        """Of products, token-local functions and collectives in forward; for SAVE_MATMULS."""
        self.together = together
        """Other ranks run it at the same place in their backward, so no decision on it may differ between ranks."""
        self.script = script
        """Operator log of the forward, which the recompute must follow."""
        self._module = module
        self._hidden = hidden
        self._hidden_grad = hidden_grad
        self._arguments = arguments
        self._state = state
        self._precision = precision
        self._costs = costs
        self._random = random
        self._lock = threading.Lock()

    def recompute(self, take: Take) -> None:
        """Runs the span unless it is in place; `take` gets each wanted tensor's storage, as bytes.

        Raises:
            ModifiedAfterSave: an argument, a parameter, a buffer or an attribute has changed since the forward.
            SwapError: the layer did not do what it did in forward.
        """
        if self.before is not None:
            self.before.recompute(take)
        with self._lock:
            if not self.span.is_filled():
                self._state.check(self.name)
                try:
                    self.run(take, timed=self.engine.backend.device.type == "cpu")
                except Diverged as how:
                    raise SwapError(
                        f"{self.name} did not repeat in backward what it did in forward: {how}; is something random, or does"
                        " it depend on what changes from call to call? Exclude it with alpha=1"
                    ) from None

    def run(self, take: Take, *, timed: bool, checksums: Checksums | None = None) -> None:
        """Runs the span, even where all of it is in place already.

        Args:
            take: is given each recomputed tensor.
            timed: measures the span, for which it waits for a device that is not the host.
            checksums: checks the memory that operators read and write; not for a span of whole layers.

        Raises:
            Diverged: the layer did not do what it did in forward.
        """
        span = self.span
        whole = local_part(self.engine.unpack(self._hidden, by_backward=False)).detach()
        is_whole = span.level is Level.SAVE_INPUT  # its one span counts no tokens
        hidden = whole if is_whole else cut(whole, Axis(dim=whole.ndim - 2), span.first, span.stop, self.tokens)
        args, kwargs = self._arguments.give(
            hidden.detach().requires_grad_(self._hidden_grad), None if is_whole else (span.first, span.stop)
        )
        self.engine.recompute_reads(argument_tensors(args, kwargs))
        collecting = _Collecting(self, span, take)
        fewer = None if is_whole else self.tokens - (span.stop - span.first)
        backend = self.engine.backend
        reading = Reading(self.script, argument_tensors(args, kwargs), fewer=fewer, here=backend.current_stream)
        if checksums is not None:
            checksums.note((*self._module.parameters(), *self._module.buffers(), *argument_tensors(args, kwargs)))
        mode = Scripted(reading) if is_whole else _Answering(self, span, collecting, reading, checksums)

        def save(tensor: torch.Tensor) -> None:
            with Aside(mode):
                if isinstance(mode, _Answering):
                    mode.check_filled("autograd", [local_part(tensor)])
                    if checksums is not None:
                        checksums.check([local_part(tensor)])
                collecting.save(tensor)

        begin = now_s(whole.device) if timed else None
        with self._as_in_forward(), saved_tensors_hooks(save, _never), mode, contextlib.suppress(_Enough):
            try:
                self._module.forward(*args, **kwargs)
            except BaseException:
                StreamOrder(backend).broken_off(reading.streams)  # while the layer's frames still hold their memory
                raise
        collecting.check_complete()
        if begin is not None:
            self._costs.ran(
                span.level, self.tokens if is_whole else span.stop - span.first, now_s(whole.device) - begin
            )

    @contextlib.contextmanager
    def _as_in_forward(self) -> Iterator[None]:
        random = contextlib.nullcontext() if self._random is None else self._random.again()
        with torch.enable_grad(), self._precision.again(), random:
            yield


class _Enough(BaseException):
    """Ends a replay after the last wanted tensor. A BaseException, so that the layer's own handlers let it pass."""


def _never(packed: None) -> torch.Tensor:
    raise AssertionError("nothing is backwarded through a replay")


class _Collecting:
    """Collects the wanted tensors from those that autograd saves in a replay, by position."""

    def __init__(self, call: LayerCall, span: Span, take: Take) -> None:
        self._call = call
        self._span = span
        self._take = take
        self._wanted = iter(span.wanted)
        self._next = next(self._wanted, None)
        self._position = 0

    def save(self, tensor: torch.Tensor) -> None:
        """Takes a tensor that autograd saves, if it is the next wanted one."""
        wanted, position = self._next, self._position
        self._position += 1
        if wanted is None or position != wanted.position:
            return
        local = local_part(tensor).detach()
        if local.dtype != wanted.dtype or not wanted.layout.fits(local):
            raise Diverged(
                f"it saved {tuple(local.shape)} of {local.dtype} with strides {local.stride()} for"
                f" {wanted.layout.shape} of {wanted.dtype} with strides {wanted.layout.stride}"
            )
        count = self._span.stop - self._span.first
        rows = wanted.rows if wanted.axis is None else rows_of(local, wanted.axis, count)
        storage = local.untyped_storage()
        if rows != wanted.rows or storage.nbytes() != wanted.rows.nbytes(count):
            raise Diverged("it laid a saved tensor out in memory in another way")
        self._take(self._span, wanted, torch.empty(0, dtype=torch.uint8, device=local.device).set_(storage))
        self._next = next(self._wanted, None)
        if self._next is None:
            raise _Enough

    def check_complete(self) -> None:
        if self._next is not None:
            raise Diverged("it saved less")


class _Answering(SleepingMode):
    """Dispatch mode of a token-wise replay: reuses saved results, on the tokens of one span."""

    def __init__(
        self, call: LayerCall, span: Span, collecting: _Collecting, reading: Reading, checksums: Checksums | None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._checksums = checksums
        self._call = call
        self._span = span
        self._collecting = collecting
        self._answers = iter(call.answers)
        results = call.results if span.level is Level.SAVE_MATMULS else ()
        self._results = {result.line: (result, treatment) for result, treatment in results}
        self._reading = reading
        # What stands for omitted results. Nothing may compute with it.
        self._empty: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()
        self._has_empty = False

    def called(self, given: Given) -> Any:
        checksums = self._checksums
        if checksums is None:
            return self._called(given)
        checksums.check(given.read())
        out = self._called(given)
        if not given.operator.is_collective:  # whose results are not there yet
            checksums.note((*tensors_in(out), *given.changed()))
        return out

    def _called(self, given: Given) -> Any:
        origin = self._reading.calls(given)
        operator = given.operator
        func = operator.func
        if operator.is_attention or operator.is_random:
            self.check_filled(func, given.tensors)
            out = self._answer(func, given.args)
        else:
            out = self._result() if operator.is_product or operator.is_collective or operator.joins else None
            if out is None:
                out = given.call()
                if self._has_empty:
                    self.check_filled(func, given.tensors, tensors_in(out))
        self._reading.makes(out, origin)
        return out

    def memoized(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], token_dim: int | None
    ) -> Any:
        """Reuses the results of a memoized function; its arguments count as saved."""
        origin = self._reading.leaves_out(function)
        with Aside(self):
            given = tensors_in((args, kwargs))
            self.check_filled(function, given)
            for tensor in given:
                self._collecting.save(tensor)
            out = self._answer(function, args)
        self._reading.makes(out, origin)
        return out

    def token_local(self, call: TokenLocalCall) -> torch.Tensor:
        """Reuses a token-local function's result, or runs it again on these tokens (collectives on all ranks)."""
        if self.asleep:
            return call.run()
        given = tensors_in((call.x, call.others))
        origin = self._reading.line(str(call), given=given)
        with Aside(self):
            out = self._result()
            if out is None:
                self.check_filled(call, given)
                out = call.run()
        self._reading.makes(out, origin)
        return out

    def check_filled(self, func: object, given: Sequence[torch.Tensor], results: Sequence[torch.Tensor] = ()) -> None:
        """Raises Diverged for a call that reads elements of an omitted result; views of it are allowed."""
        if not self._has_empty:
            return
        for tensor in given:
            storage = tensor.untyped_storage()
            if storage in self._empty and not (results and all(r.untyped_storage() is storage for r in results)):
                raise Diverged(f"{func} uses a result that nothing used")

    def _answer(self, func: Any, args: Sequence[Any]) -> Any:
        answer = next(self._answers, None)
        if answer is None or answer.func != func:  # type: ignore[attr-defined]
            raise Diverged(f"it called {func}")
        return answer.give(self._call.engine, args, (self._span.first, self._span.stop), self._call.tokens)

    def _result(self) -> torch.Tensor | None:
        """Result of the current line at SAVE_MATMULS; None where it is computed again."""
        result, treatment = self._results.get(self._reading.read, (None, Treatment.REPEATED))
        if result is None or treatment is Treatment.REPEATED:
            return None
        if treatment is Treatment.KEPT:
            return result.give(self._call.engine)
        out = result.empty()
        self._empty.add(out.untyped_storage())
        self._has_empty = True
        return out
