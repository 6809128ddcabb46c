"""Token split of one layer call: the head of each saved storage moves, the rest is recomputed in backward.

The proof is prover.py's: a storage is divided where the token axis of the saved tensor is known and accounts for every
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
    """Recomputes of one layer call, in the order of running, and the storages that move in part."""

    calls: tuple[LayerCall, ...]
    parts: dict[SavedStorage, TokenPrefix]
    operators: tuple[Any, ...] = ()
    """Of the forward, in order."""
    treatments: tuple[Treatment, ...] = ()
    """Of its results at the middle level."""
    left_out: int | None = None
    """For a layer that runs again whole: number of saved tensors after the last one that is wanted."""

    @property
    def shared_form(self) -> object:
        """Part of the recompute that must be equal on all ranks that run it together.

        A whole run may save other tensors on each rank, as around a ring in which later ranks attend to more tokens; its
        collectives are the same up to where all ranks stop.
        """
        return self.form if self.left_out is None else self.left_out

    @property
    def steps(self) -> tuple[Any, ...]:
        """Operations of the recompute, independent of the sequence length."""
        spans = ((call.span.level, *(want.position for want in call.span.wanted)) for call in self.calls)
        return (self.operators, self.treatments, self.left_out, *spans)

    @property
    def form(self) -> tuple[Any, ...]:
        """Operations and shapes of the recompute, which one trial covers."""
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


def divide(record: ForwardRecord, output: Any, engine: Engine, costs: Costs) -> Division | None:
    """Divides the saved tensors of one call; None where nothing can be divided and everything moves whole.

    Raises:
        Unproven: the layer must not be divided.
    """
    prover = record.prover
    assert prover is not None
    if prover.reason is not None:
        raise Unproven(prover.reason)
    record.check_unchanged()
    found = list(_divisible(record, output, engine))
    if not found:
        return None
    tokens, (first, second) = prover.tokens.tokens, prover.ends
    last_wanted = max((item.position for item in found if not item.is_result), default=-1)
    treated = tuple(zip(prover.results, treatments(prover.results, last_wanted), strict=True))
    kept = [result for result, treatment in treated if treatment is Treatment.KEPT]
    hidden = engine.pack(record.given)
    for answer in prover.answers:
        if not isinstance(answer, RandomAnswer):
            answer.store(engine)
    _count(costs, record, found, kept, engine)
    for answer in prover.answers:
        if isinstance(answer, RandomAnswer):
            answer.store(engine)
    for result, treatment in treated:
        if treatment is Treatment.KEPT and first < second:
            result.store(engine)
        else:
            result.drop()
    record.arguments.join(prover.joined)
    replay = functools.partial(record.replay, engine, costs, hidden=hidden, answers=prover.answers)
    last = _span(Level.SAVE_ATTENTION, second, tokens, found, tokens)
    middle = _span(Level.SAVE_MATMULS, first, second, [item for item in found if not item.is_result], tokens)
    later = replay(span=last) if last.wanted else None
    earlier = replay(span=middle, before=later, results=treated) if middle.wanted else later
    parts: dict[SavedStorage, TokenPrefix] = {}
    for item in found:
        call, head = (later, second) if item.is_result else (earlier, first)
        if call is not None and head < tokens:
            parts[item.saved] = TokenPrefix(call, item.rows, tokens=tokens, first=head)
    calls = tuple(call for call in dict.fromkeys((later, earlier)) if call is not None)
    return Division(
        calls=calls,
        parts=parts,
        operators=record.script.operators(),
        treatments=tuple(treatment for _, treatment in treated),
    )


def _divisible(record: ForwardRecord, output: Any, engine: Engine) -> Iterator[_Divisible]:
    """Each divisible storage once, at the first position where autograd saved its present content."""
    prover = record.prover
    assert prover is not None
    tokens = prover.tokens.tokens
    seen = {*prover.whole, *record.kept_whole(output)}
    results = {result.saved_in(engine) for result in prover.results} - {None}
    for position, slot in enumerate(prover.slots):
        tensor, axis = slot.tensor, slot.meaning
        storage = tensor.untyped_storage()
        if storage in seen or prover.is_outside(tensor):
            continue
        saved = record.saved_storage(engine, storage)
        if saved is None:
            continue
        if axis is Mark.MIXED:
            raise Unproven(prover.mixes)
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
    costs: Costs, record: ForwardRecord, found: Sequence[_Divisible], kept: Sequence[Result], engine: Engine
) -> None:
    """Counts bytes per level; runs before anything is packed that only some levels need."""
    prover = record.prover
    assert prover is not None
    tokens = prover.tokens.tokens
    masks = sum(answer.bits_per_token for answer in prover.answers if isinstance(answer, RandomAnswer)) / 8
    results = sum(item.rows.nbytes(1) for item in found if item.is_result)
    # What lies in several pieces is gathered to move, in a block that stands beside it.
    in_pieces = [item for item in found if item.rows.rows > 1]
    gathered_results = sum(item.rows.nbytes(1) for item in in_pieces if item.is_result)
    besides = sum(result.bytes_per_token for result in kept if result.saved_in(engine) is None)
    costs.counted(
        tokens=tokens,
        input_bytes=record.input_nbytes(engine),
        always_bytes=record.saved_nbytes() - sum(item.saved.nbytes for item in found),
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
