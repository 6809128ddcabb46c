"""Trial of a replay: runs it at the end of the forward, and compares what it gives with what autograd saved, bit for bit.

A replay of a part of the tokens may round in another way, as products of fewer rows do, within a stated bound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from memo.errors import MemoError
from memo.swap.recompute.axis.token_axis import cut
from memo.swap.recompute.comparison import have_same_bits, relative_difference
from memo.swap.recompute.ranges.ranged_replay import RangedReplay
from memo.swap.recompute.tape.replay import ReplayFailed

if TYPE_CHECKING:
    from memo.swap.engine.saved_storage import SavedStorage
    from memo.swap.recompute.ranges.ranged_plan import Piece, Span
    from memo.swap.recompute.tape.plan import Plan
    from memo.swap.recompute.tape.replay import Replay, Wanted

__all__ = ["BOUND", "ReplayMismatch", "try_out", "try_out_ranges"]

# Largest accepted root-mean-square difference between a replayed and a saved tensor, in units of the type's epsilon and of
# the tensor's own root mean square. A matrix product of another height may run through another kernel, which adds in
# another order: one rounding of the result in half precision, a few in single and double. Wrong tokens differ by about 1.
BOUND = {torch.float64: 16.0, torch.float32: 16.0, torch.bfloat16: 1.0, torch.float16: 1.0}


class ReplayMismatch(Exception):
    """The replay gave something else; `step` is the earliest one at fault, None where that is not known."""

    def __init__(self, step: int | None, reason: str) -> None:
        super().__init__(reason)
        self.step = step


def try_out(replay: Replay, *, release: Callable[[int, SavedStorage], bool] | None = None) -> None:
    """Runs a replay while all that was saved is still there.

    Args:
        replay: of the call that has just ended.
        release: for a trial that holds no storage twice. It is called with the number and the record of each storage whose
            replay has the same bits, which then takes its place where it returns True.

    Raises:
        ReplayMismatch: a step could not run again, or a storage differs where autograd saved a part of it.
        torch.OutOfMemoryError: there was no device memory for it.
    """
    plan = replay.plan
    worst: int | None = None
    storages = dict(zip(map(id, replay.wanted), plan.wanted, strict=True))

    def compare(span: Any, want: Any, made: torch.Tensor, /, *, owned: bool = False) -> None:
        nonlocal worst
        hold = want.hold()
        if hold is None or hold.saved.source is None:
            return
        storage = storages[id(want)]
        if _equal(plan, storage, hold.saved.source, made):
            is_same_size = owned and made.numel() == hold.saved.source.numel()
            if is_same_size and release is not None and release(storage, hold.saved):
                hold.saved.source = made
        else:
            writer = plan.tape.contents[plan.tape.last[storage]].writer
            worst = writer if worst is None else min(worst, writer)

    try:
        replay.run(compare)
    except ReplayFailed as failure:
        raise ReplayMismatch(failure.step, f"it cannot run again ({failure})") from failure.__cause__
    except MemoError as error:
        raise ReplayMismatch(None, str(error)) from error
    if worst is not None:
        raise ReplayMismatch(worst, f"repeating {plan.tape.steps[worst].name} gave something else")


def _equal(plan: Plan, storage: int, source: torch.Tensor, made: torch.Tensor) -> bool:
    """True where all that autograd saved of a storage has the same bits. Gaps between elements do not count."""
    if have_same_bits(made.view(1, -1), source.view(1, -1)):
        return True
    for value in {use.value for use in plan.tape.saved if plan.tape.geometry(use.value)[0] == storage}:
        _, offset, size, stride, dtype = plan.tape.geometry(value)
        ours, theirs = (
            torch.empty(0, dtype=dtype, device=block.device)
            .set_(block.untyped_storage(), offset, size, stride)
            .contiguous()
            .view(-1)
            .view(torch.uint8)
            .view(1, -1)
            for block in (made, source)
        )
        if not have_same_bits(ours, theirs):
            return False
    return True


def try_out_ranges(replays: Sequence[Replay], *, exact: bool) -> float:
    """Runs the replays of a plan of token ranges while all that was saved is still there.

    Returns:
        Largest difference of a part of the tokens found, in units of BOUND; 0 for equal bits.

    Raises:
        ReplayMismatch: a step could not run on a part of the tokens, or what it gave differs by more than the bound; or,
            where it is to be `exact` or is replayed whole, by as much as a rounding.
        torch.OutOfMemoryError: there was no device memory for it.
    """
    worst = 0.0
    for replay in replays:
        if not isinstance(replay, RangedReplay):
            continue

        def compare(piece: Piece, want: Wanted, made: torch.Tensor, replay: RangedReplay = replay) -> None:
            nonlocal worst
            hold = want.hold()
            if hold is None or hold.saved.source is None:
                return
            position = next(number for number, other in enumerate(replay.wanted) if other is want)
            off = _difference(replay.span, replay.span.wanted[position], hold.saved.source, made, piece)
            worst = math.inf if math.isnan(off) else max(worst, off)

        try:
            replay.run(compare)
        except ReplayFailed as failure:
            raise ReplayMismatch(None, f"a part of its tokens cannot run again ({failure})") from failure.__cause__
        except MemoError as error:
            raise ReplayMismatch(None, str(error)) from error
    if not worst <= 1.0 or (exact and worst > 0):  # after all replays, in which other ranks may take part
        raise ReplayMismatch(None, f"a part of its tokens differs by {worst:.3g} times the bound")
    for replay in replays:
        if not isinstance(replay, RangedReplay):
            try_out(replay)
    return worst


def _difference(span: Span, storage: int, source: torch.Tensor, made: torch.Tensor, piece: Piece) -> float:
    """Largest difference of the tokens of a piece, over all that autograd saved of a storage, in units of BOUND."""
    rows, count = span.rows, piece.stop - piece.first
    tape, content = rows.tape, rows.tape.last[storage]
    division = rows.rows[content]
    whole = source.view(division.rows, rows.tokens, division.width)[:, piece.first : piece.stop]
    if have_same_bits(made.view(division.rows, -1), whole.flatten(1)):
        return 0.0
    worst = 0.0
    for value in {use.value for use in tape.saved if use.content == content}:
        _, offset, size, stride, dtype = tape.geometry(value)
        theirs = torch.empty(0, dtype=dtype, device=source.device).set_(source.untyped_storage(), offset, size, stride)
        axis = rows.axes.get((value, content))
        if axis is None:
            return math.inf  # saved of a division that does not fit it
        theirs = cut(theirs, axis, piece.first, piece.stop, rows.tokens).contiguous().view(1, -1)
        _, offset, size, stride, dtype = rows.geometry(value, content, count)
        ours = torch.empty(0, dtype=dtype, device=made.device).set_(made.untyped_storage(), offset, size, stride)
        ours = ours.contiguous().view(1, -1)
        if have_same_bits(ours.view(torch.uint8), theirs.view(torch.uint8)):
            continue
        if dtype not in BOUND:
            return math.inf
        worst = max(worst, relative_difference(ours, theirs) / (torch.finfo(dtype).eps * BOUND[dtype]))
    return worst
