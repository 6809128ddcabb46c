"""Trial of a recompute: runs it at the end of the forward and compares its tensors with the saved ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from memo.errors import MemoError
from memo.swap.recompute.axis.operator_rules import Unproven
from memo.swap.recompute.checksums import Checksums
from memo.swap.recompute.comparison import have_same_bits, relative_difference
from memo.swap.recompute.guards.rng_and_autocast import RandomState
from memo.swap.recompute.record.operator_log import Diverged
from memo.swap.token_levels import Level

if TYPE_CHECKING:
    from memo.swap.recompute.replay import Span, Wanted
    from memo.swap.recompute.token_split import Division

__all__ = ["BOUND", "OutOfRoom", "try_out"]

# Largest accepted root-mean-square difference between a recomputed and a saved tensor, in units of the type's epsilon and
# of the tensor's own root mean square. A matrix product of another height may run through another kernel, which adds in
# another order: one rounding of the result in half precision, a few in single and double. Wrong tokens differ by about 1.
BOUND = {torch.float64: 16.0, torch.float32: 16.0, torch.bfloat16: 1.0, torch.float16: 1.0}


class OutOfRoom(Unproven):
    """The device had no memory for a trial, which does not refuse the layer: a later step tries again."""


def try_out(division: Division, device: torch.device, *, exact: bool) -> float:
    """Runs the recompute of `division`; returns the largest difference found, in units of BOUND, 0 for equal bytes.

    Raises:
        OutOfRoom: there was no device memory for it.
        Unproven: the recompute gives something else, fails, or draws random numbers; or, where it must be `exact`, it rounds
            in another way.
    """
    random = RandomState(device)
    worst = 0.0

    def compare(span: Span, want: Wanted, part: torch.Tensor) -> None:
        nonlocal worst
        hold = want.hold()
        if hold is None:
            return  # nobody will ask for it
        saved = hold.saved
        assert saved.source is not None
        worst = max(worst, _difference(division.parts[saved].part_of(saved.source, span), part, want))

    try:
        for call in division.calls:
            call.run(compare, timed=True)
        _check_in_place_changes(division, device)
    except Diverged as how:
        raise Unproven(f"its recompute did something else: {how}") from None
    except (Unproven, MemoError) as error:
        raise Unproven(str(error)) from error
    except torch.OutOfMemoryError as error:
        if division.calls[0].together:
            raise  # of this rank alone, and the others wait for it in a collective
        raise OutOfRoom("there was no device memory to try its recompute out") from error
    except Exception as error:
        what = str(error).splitlines()[0] if str(error) else ""
        raise Unproven(f"it cannot run again ({type(error).__name__}: {what})") from error
    finally:
        drew = not random.is_now()
        if drew:
            random.restore()
    if drew:
        raise Unproven("its recompute draws random numbers")
    if exact and worst > 0:
        raise Unproven("its recompute rounds in another way, and is to be exact")
    return worst


def _check_in_place_changes(division: Division, device: torch.device) -> None:
    """Runs the recompute once more; raises Unproven where a kernel below the dispatcher works in place.

    Not for layers that other ranks take part in: a rank that has failed by now would leave them waiting.
    """
    for call in division.calls:
        if call.together or call.span.level is Level.SAVE_INPUT:
            continue
        checksums = Checksums(device)
        call.run(lambda span, want, part: None, timed=False, checksums=checksums)
        if checksums.differ():
            raise Unproven(
                "a kernel that torch does not see changes in place what an operator gave; mark the function that calls it"
                " with memo.memoize"
            )


def _difference(saved: torch.Tensor, again: torch.Tensor, want: Wanted) -> float:
    """Difference of saved bytes (rows x tokens x width) from recomputed ones, in units of BOUND. Raises Unproven above 1."""
    theirs = saved.flatten(1)  # a row's tokens lie one behind the other
    ours = again.view(theirs.shape)
    if have_same_bits(ours, theirs):
        return 0.0
    if want.dtype not in BOUND or theirs.shape[1] % want.dtype.itemsize:
        raise Unproven(f"a recomputed tensor of {want.dtype} differs from the saved one")
    off = relative_difference(ours.view(want.dtype), theirs.view(want.dtype))
    off /= torch.finfo(want.dtype).eps * BOUND[want.dtype]
    if not off <= 1.0:  # also where it is no number
        raise Unproven(
            f"what it recomputes of a tensor of shape {want.layout.shape} and {want.dtype} differs from what it saved"
            f" by {off:.3g} times the bound"
        )
    return off
