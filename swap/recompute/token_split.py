"""Divides what one layer call saved by tokens: what of each storage moves, and what which recompute gives back.

The proof is the noting's: a storage is divided where the token axis of the saved tensor is known and accounts for every
byte of it. Everything else moves whole.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from memo.swap.engine.token_prefix import Rows, TokenPrefix
from memo.swap.recompute.axis.operator_rules import Unproven
from memo.swap.recompute.axis.token_axis import Axis, Mark, layout_of_part, rows_of
from memo.swap.recompute.record.keep_or_repeat import Treatment, treatments
from memo.swap.recompute.record.kept_results import Result
from memo.swap.recompute.record.memoized import RandomAnswer
from memo.swap.recompute.replay import LayerCall, Span, Wanted
from memo.swap.token_levels import Level

if TYPE_CHECKING:
    import torch

    from memo.swap.engine.engine import Engine
    from memo.swap.engine.saved_storage import SavedStorage
    from memo.swap.recompute.forward_record import ForwardRecord
    from memo.swap.recompute.level_costs import Costs

__all__ = ["Division", "divide"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """What can compute again what does not move, in the order of running, and which storages move in part."""

    calls: tuple[LayerCall, ...]
    parts: dict[SavedStorage, TokenPrefix]
    operators: tuple[Any, ...] = ()
    """That the forward called."""
    treatments: tuple[Treatment, ...] = ()
    """Of its results at the middle level."""
    left_out: int | None = None
    """Of a layer that runs again whole: how many of its saved tensors come after the last one that is wanted."""

    @property
    def course(self) -> object:
        """What must be the same on all ranks that take part. A whole run may save other tensors on each of them, as around
        a ring in which later ranks attend to more; what they do together is the same up to where all stop."""
        return self.form if self.left_out is None else self.left_out

    @property
    def steps(self) -> tuple[Any, ...]:
        """What its recompute does, at whatever length."""
        spans = ((call.span.level, *(want.position for want in call.span.wanted)) for call in self.calls)
        return (self.operators, self.treatments, self.left_out, *spans)

    @property
    def form(self) -> tuple[Any, ...]:
        """What a trial of it proves something about."""
        spans = (
            (span.first, span.stop, span.level, *((w.position, w.layout, w.rows) for w in span.wanted))
            for span in (call.span for call in self.calls)
        )
        return (self.operators, self.treatments, *spans)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Divisible:
    """A saved storage that tokens divide; `position` is where autograd first saved it."""

    position: int
    tensor: torch.Tensor
    axis: Axis
    rows: Rows
    saved: SavedStorage
    is_result: bool


def divide(watch: ForwardRecord, output: Any, engine: Engine, costs: Costs) -> Division | None:
    """None where nothing can be divided, and everything moves whole.

    Raises:
        Unproven: the layer must not be divided.
    """
    noting = watch.noting
    assert noting is not None
    if noting.reason is not None:
        raise Unproven(noting.reason)
    watch.check_unchanged()
    found = list(_divisible(watch, output, engine))
    if not found:
        return None
    tokens, (first, second) = noting.tokens.tokens, noting.ends
    last_wanted = max((item.position for item in found if not item.is_result), default=-1)
    treated = tuple(zip(noting.results, treatments(noting.results, last_wanted), strict=True))
    kept = [result for result, treatment in treated if treatment is Treatment.KEPT]
    hidden = engine.pack(watch.given)
    for answer in noting.answers:
        if not isinstance(answer, RandomAnswer):
            answer.store(engine)
    _count(costs, watch, found, kept, engine)
    for answer in noting.answers:
        if isinstance(answer, RandomAnswer):
            answer.store(engine)
    for result, treatment in treated:
        if treatment is Treatment.KEPT and first < second:
            result.store(engine)
        else:
            result.drop()
    watch.arguments.join(noting.joined)
    make = functools.partial(
        LayerCall,
        engine,
        watch.layer.module,
        watch.layer.name,
        hidden=hidden,
        hidden_grad=watch.given.requires_grad,
        arguments=watch.arguments,
        state=watch.state,
        precision=watch.precision,
        tokens=tokens,
        costs=costs,
        together=watch.together,
        answers=noting.answers,
        script=watch.script,
    )
    last = _span(Level.SAVE_ATTENTION, second, tokens, found, tokens)
    middle = _span(Level.SAVE_MATMULS, first, second, [item for item in found if not item.is_result], tokens)
    later = make(span=last, before=None) if last.wanted else None
    earlier = make(span=middle, before=later, results=treated) if middle.wanted else later
    parts: dict[SavedStorage, TokenPrefix] = {}
    for item in found:
        call, head = (later, second) if item.is_result else (earlier, first)
        if call is not None and head < tokens:
            parts[item.saved] = TokenPrefix(call, item.rows, tokens=tokens, first=head)
    calls = tuple(call for call in dict.fromkeys((later, earlier)) if call is not None)
    return Division(
        calls=calls,
        parts=parts,
        operators=watch.script.operators(),
        treatments=tuple(treatment for _, treatment in treated),
    )


def _divisible(watch: ForwardRecord, output: Any, engine: Engine) -> Iterator[_Divisible]:
    """Each storage once, at the first place where autograd saved it as it is."""
    noting = watch.noting
    assert noting is not None
    tokens = noting.tokens.tokens
    seen = {*noting.whole, *watch.kept_whole(output)}
    results = {result.saved_in(engine) for result in noting.results} - {None}
    for position, slot in enumerate(noting.slots):
        tensor, axis = slot.tensor, slot.meaning
        storage = tensor.untyped_storage()
        if storage in seen or noting.is_outside(tensor):
            continue
        saved = engine.saved_as(storage)
        if saved is None or saved.group is not watch.group:
            continue  # too small to move, or another layer's
        if axis is Mark.MIXED:
            raise Unproven(noting.mixes)
        if saved.content != slot.content:
            continue  # what it held before it was changed in place and saved again
        seen.add(storage)
        if not isinstance(axis, Axis) or slot.given._version != slot.content[0]:
            continue
        rows = rows_of(tensor, axis, tokens)
        if rows is not None:
            is_result = saved in results
            yield _Divisible(position=position, tensor=tensor, axis=axis, rows=rows, saved=saved, is_result=is_result)


def _count(
    costs: Costs, watch: ForwardRecord, found: Sequence[_Divisible], kept: Sequence[Result], engine: Engine
) -> None:
    """Before anything is saved that only some levels need."""
    noting = watch.noting
    assert noting is not None
    tokens = noting.tokens.tokens
    masks = sum(answer.bits_per_token for answer in noting.answers if isinstance(answer, RandomAnswer)) / 8
    results = sum(item.rows.nbytes(1) for item in found if item.is_result)
    # What lies in several pieces is gathered to move, in a block that stands beside it.
    in_pieces = [item for item in found if item.rows.rows > 1]
    gathered_results = sum(item.rows.nbytes(1) for item in in_pieces if item.is_result)
    besides = sum(result.bytes_per_token for result in kept if result.saved_in(engine) is None)
    every = sum(saved.nbytes for saved in watch.group.living())
    source = engine.saved_as(watch.hidden.untyped_storage())
    costs.counted(
        tokens=tokens,
        input_bytes=0 if source is None else source.nbytes,
        always_bytes=every - sum(item.saved.nbytes for item in found),
        bytes_per_token={
            Level.SAVE_ALL: sum(item.rows.nbytes(1) for item in found),
            Level.SAVE_MATMULS: results + besides + masks,
            Level.SAVE_ATTENTION: masks,
        },
        beside_per_token={
            Level.SAVE_ALL: sum(item.rows.nbytes(1) for item in in_pieces),
            Level.SAVE_MATMULS: gathered_results + besides + masks,
            Level.SAVE_ATTENTION: masks,
        },
    )


def _span(level: Level, first: int, stop: int, found: Sequence[_Divisible], tokens: int) -> Span:
    if first >= stop:
        return Span(first=first, stop=stop, level=level, wanted=())
    wanted = tuple(
        Wanted(
            position=item.position,
            hold=item.saved.hold,
            axis=item.axis,
            rows=item.rows,
            layout=layout_of_part(item.tensor, item.axis, item.rows, stop - first, tokens),
            dtype=item.tensor.dtype,
        )
        for item in found
    )
    return Span(first=first, stop=stop, level=level, wanted=wanted)
