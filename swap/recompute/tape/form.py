"""Form of a tape: everything in it except sizes. A decision what to keep and repeat is valid for all tapes of one form."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from memo.swap.recompute.tape.plan import mask_of
from memo.swap.recompute.tape.tape import Hidden, Step, Tape, uses_in

__all__ = ["have_same_form", "have_same_sizes"]


def have_same_form(one: Tape, other: Tape) -> bool:
    """True where two tapes differ only in sizes, and in integers among the arguments of their steps."""
    return (
        len(one.steps) == len(other.steps)
        and one.contents == other.contents
        and one.saved == other.saved
        and one.opaque == other.opaque
        and [_without_bytes(each) for each in one.storages] == [_without_bytes(each) for each in other.storages]
        and [_without_sizes(each) for each in one.values] == [_without_sizes(each) for each in other.values]
        and all(_are_alike(ours, theirs) for ours, theirs in zip(one.steps, other.steps, strict=True))
        and _masks(one) == _masks(other)
    )


def have_same_sizes(one: Tape, other: Tape, steps: Collection[int]) -> bool:
    """True where these steps of two tapes of one form have equal arguments, and operands and results of equal sizes."""
    return all(
        one.steps[number].args == other.steps[number].args
        and one.steps[number].kwargs == other.steps[number].kwargs
        and all(
            one.geometry(use.value) == other.geometry(use.value)
            and one.storage(use.content)[1] == other.storage(use.content)[1]
            for use in uses_in((one.steps[number].args, one.steps[number].kwargs, one.steps[number].out))
        )
        for number in steps
    )


def _without_bytes(storage: Sequence[Any]) -> Any:
    birth, _, maker = storage
    return birth, maker


def _without_sizes(geometry: Sequence[Any]) -> Any:
    storage, _, size, _, dtype = geometry
    return storage, len(size), dtype


def _masks(tape: Tape) -> list[int]:
    """Contents of zeros and ones, which may be kept as bits."""
    return [content for content in range(len(tape.contents)) if mask_of(tape, content) is not None]


def _are_alike(one: Step, other: Step) -> bool:
    return (
        one.operator == other.operator
        and one.reads == other.reads
        and one.makes == other.makes
        and one.opaque == other.opaque
        and _are_alike_values((one.args, one.kwargs, one.out), (other.args, other.kwargs, other.out))
    )


def _are_alike_values(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_are_alike_values, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_are_alike_values(one[name], other[name]) for name in one)
    return type(one) is int or isinstance(one, Hidden) or bool(one == other)
