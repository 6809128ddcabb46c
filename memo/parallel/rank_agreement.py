"""Agreement between ranks: each contributes a value, and all take the same decision from the values.

A recompute repeats its layer's collectives, so all that starts one (fractions of tokens, a plan, the step at which it
changes) must be equal on all ranks of the layer's groups. Every function here is a collective call: each rank of the
group makes it, in the same order as the group's other collectives. Without a process group the values are this rank's
own.
"""

from __future__ import annotations

from typing import TypeVar

import torch
import torch.distributed as dist

from memo.errors import UsageError
from memo.swap import equal_on_all_ranks, gather_values as gather_values

_T = TypeVar("_T")


def agree(value: _T, group: dist.ProcessGroup | None = None) -> _T:
    """The value of the group's first rank, on every rank."""
    return gather_values(value, group)[0]


def require_same_batch(group: dist.ProcessGroup, *given: torch.Tensor) -> None:
    """Raises UsageError on every rank where ranks are given other tensors of integers, or tensors of other shapes.

    Called before each forward, since collectives of tensors of different sizes are undefined, and gradients of different
    tokens silently wrong. Compares on the device.
    """
    shapes = [tuple(one.shape) for one in given]
    integers = [one.flatten().to(given[0].device) for one in given if not one.is_floating_point()]
    if not equal_on_all_ranks(shapes, group, given[0].device, torch.cat(integers) if integers else None):
        require_equal(shapes, group, what="the batch of ranks that compute each layer together")
        raise UsageError(
            "ranks that compute each layer together have other tokens or labels; give ranks that differ in dp alone batches "
            "of their own"
        )


def require_same_draws(device: torch.device, group: dist.ProcessGroup) -> None:
    """Raises UsageError on every rank where ranks would draw other random numbers, and so drop other activations."""
    state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
    if not equal_on_all_ranks(bytes(state.tolist()), group, device):
        raise UsageError(
            "the model has dropout, and the ranks that compute each layer together draw other random numbers; seed those of "
            "one tensor-parallel group alike"
        )


def require_equal(value: _T, group: dist.ProcessGroup | None = None, *, what: str) -> None:
    """Raises UsageError on every rank where ranks have different values; `what` names them in the message."""
    said = gather_values(value, group)
    other = next((index for index, theirs in enumerate(said) if theirs != said[0]), None)
    if other is not None:
        ranks = dist.get_process_group_ranks(group)
        raise UsageError(
            f"{what}: {said[0]} on rank {ranks[0]}, but {said[other]} on rank {ranks[other]}, which must be equal"
        )
