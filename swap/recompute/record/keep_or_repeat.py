"""Treatment of matrix products' and token-local functions' results at SAVE_MATMULS: repeated, kept or omitted.

    norm     gather   product     split   ...   product    sum      add, norm   gather   product   activation
    repeated OMITTED  KEPT        repeated      OMITTED    KEPT     repeated    OMITTED  KEPT      repeated

A result is omitted when all that reads it before the recompute stops has a kept result, or is omitted, too: the
recompute then gets memory of its shape with nothing in it. That nothing but views and such readers ever touch this
memory is decided here, from what the forward did, and enforced in the replay, which raises where something else does.
So a tensor-parallel layer repeats none of its collectives at this level.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence

from memo.swap.recompute.record.kept_results import Result

__all__ = ["Treatment", "treatments"]


class Treatment(enum.Enum):
    """Treatment of one result at SAVE_MATMULS."""

    KEPT = "saved, and given"
    OMITTED = "not needed, and left empty"
    REPEATED = "computed again"


def treatments(results: Sequence[Result], last: int) -> tuple[Treatment, ...]:
    """In the order of the results; a recompute stops when autograd saves the tensor that `last` counts."""
    found: dict[Result, Treatment] = {}
    for result in reversed(results):  # what reads a result comes after it
        found[result] = _treatment(result, found, last)
    return tuple(found[result] for result in results)


def _treatment(result: Result, later: Mapping[Result, Treatment], last: int) -> Treatment:
    if result.axis is None or result.position > last:
        return Treatment.REPEATED
    readers = [reader.result for reader in result.readers if reader.position <= last]
    if all(reader is not None and later[reader] is not Treatment.REPEATED for reader in readers):
        return Treatment.OMITTED
    return Treatment.KEPT if result.can_be_kept else Treatment.REPEATED
