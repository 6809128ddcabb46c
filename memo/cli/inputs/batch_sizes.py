"""Flags of a step's sequences, the same in `memo plan` and `memo train`: microbatch, microbatches in a step, and all of it.

--global-batch = --batch  x  data-parallel ranks  x  --accumulate        any that is left out follows from the others
"""

from __future__ import annotations

import dataclasses

from memo.cli.inputs.flag_types import Count
from memo.errors import UsageError


@dataclasses.dataclass(frozen=True, kw_only=True)
class BatchOptions:
    """Sequences of a step as they are asked for. The fields are flags."""

    batch: Count | None = None
    """Sequences in a microbatch of each data-parallel rank: the micro batch size, not the global one (default 1)."""
    accumulate: Count | None = None
    """Microbatches in a step (default 1)."""
    global_batch: Count | None = None
    """Sequences in a step of all ranks: --batch x data-parallel ranks x --accumulate; may replace either of them."""


def batch_sizes(
    batch: int | None, accumulate: int | None, global_batch: int | None, *, replicas: int
) -> tuple[int, int]:
    """Completes the numbers that were given.

    Args:
        batch: --batch, or None.
        accumulate: --accumulate, or None.
        global_batch: --global-batch, or None.
        replicas: data-parallel ranks.

    Returns:
        Sequences in a microbatch of each data-parallel rank, and microbatches in a step.

    Raises:
        UsageError: they contradict one another.
    """
    given = {"--batch": batch, "--accumulate": accumulate, "--global-batch": global_batch}
    if global_batch is None:
        return batch or 1, accumulate or 1
    known = replicas * (batch or 1) * (accumulate or 1)
    if batch is None and accumulate is not None and global_batch % known == 0:
        return global_batch // known, accumulate
    if accumulate is None and global_batch % known == 0:
        return batch or 1, global_batch // known
    if known == global_batch:
        assert batch is not None
        assert accumulate is not None
        return batch, accumulate
    parts = [f"{flag} {given[flag]}" for flag in ("--batch", "--accumulate") if given[flag] is not None]
    parts.append(f"{replicas} data-parallel rank{'s' * (replicas > 1)}")
    verb = "is not" if batch is not None and accumulate is not None else "is no multiple of"
    raise UsageError(f"--global-batch {global_batch} {verb} {' x '.join(parts)}, which is {known}")
