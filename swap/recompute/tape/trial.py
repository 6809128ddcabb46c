"""Trial of a replay: runs it at the end of the forward, and compares what it gives with what autograd saved, bit for bit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from memo.errors import MemoError
from memo.swap.recompute.comparison import have_same_bits
from memo.swap.recompute.tape.replay import ReplayFailed

if TYPE_CHECKING:
    from memo.swap.recompute.tape.plan import Plan
    from memo.swap.recompute.tape.replay import Replay, Wanted, Whole

__all__ = ["Unlike", "try_out"]


class Unlike(Exception):
    """The replay gave something else; `step` is the earliest one at fault, None where that is not known."""

    def __init__(self, step: int | None, reason: str) -> None:
        super().__init__(reason)
        self.step = step


def try_out(replay: Replay) -> None:
    """Runs a replay while all that was saved is still there.

    Raises:
        Unlike: a step could not run again, or a storage differs where autograd saved a part of it.
        torch.OutOfMemoryError: there was no device memory for it.
    """
    plan = replay.plan
    worst: int | None = None

    def compare(span: Whole, want: Wanted, made: torch.Tensor, *, owned: bool) -> None:
        nonlocal worst
        hold = want.hold()
        if hold is None or hold.saved.source is None:
            return
        position = next(number for number, other in enumerate(replay.wanted) if other is want)
        content = plan.tape.last[plan.wanted[position]]
        if not _equal(plan, plan.wanted[position], hold.saved.source, made):
            writer = plan.tape.contents[content].writer
            worst = writer if worst is None else min(worst, writer)

    try:
        replay.run(compare)
    except ReplayFailed as failure:
        raise Unlike(failure.step, f"it cannot run again ({failure})") from failure.__cause__
    except MemoError as error:
        raise Unlike(None, str(error)) from error
    if worst is not None:
        raise Unlike(worst, f"repeating {plan.tape.steps[worst].name} gave something else")


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
