"""Trial of a replay: runs it at the end of the forward, and compares what it gives with what autograd saved, bit for bit.

Bits are compared in pieces, so that a trial's memory does not grow with them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from memo.errors import MemoError
from memo.swap.levels import COMPARED
from memo.swap.recompute.tape.replay import ReplayFailed

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from memo.swap.engine.saved_storage import HasHold, SavedStorage
    from memo.swap.recompute.tape.plan import Plan
    from memo.swap.recompute.tape.replay import Replay


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

    def compare(want: HasHold, made: torch.Tensor) -> None:
        nonlocal worst
        hold = want.hold()
        if hold is None or hold.saved.source is None:
            return
        storage = storages[id(want)]
        if _equal(plan, storage, hold.saved.source, made):
            if release is not None and release(storage, hold.saved):
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
    if _have_same_bits(made, source):
        return True
    for value in {use.value for use in plan.tape.saved if plan.tape.geometry(use.value)[0] == storage}:
        _, offset, size, stride, dtype = plan.tape.geometry(value)
        ours, theirs = (
            torch.empty(0, dtype=dtype, device=block.device)
            .set_(block.untyped_storage(), offset, size, stride)
            .contiguous()
            .view(-1)
            .view(torch.uint8)
            for block in (made, source)
        )
        if not _have_same_bits(ours, theirs):
            return False
    return True


def _have_same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if two blocks of bytes are equal: uint8, one dimension, contiguous. One verdict is read back to the host."""
    differ = torch.zeros((), dtype=torch.bool, device=one.device)
    begin_at_words = not any(int(block.storage_offset()) % 8 for block in (one, other))
    words = one.numel() // 8 * 8 if begin_at_words else 0
    if words:
        for our, their in _pieces(one[:words].view(torch.int64), other[:words].view(torch.int64)):
            differ |= (our != their).any()
    for our, their in _pieces(one[words:], other[words:]):
        differ |= (our != their).any()
    return torch.equal(differ, torch.zeros_like(differ))  # which tensors without bytes answer too


def _pieces(one: torch.Tensor, other: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Pairs of views of at most COMPARED elements."""
    return zip(one.split(COMPARED), other.split(COMPARED), strict=True)
