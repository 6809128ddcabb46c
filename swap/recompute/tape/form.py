"""Form of a tape: all of it but sizes. Where two tapes have one form, both may keep and repeat the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from memo.swap.recompute.tape.plan import mask_of
from memo.swap.recompute.tape.tape import Hidden, Tape, TapeStep


def have_same_form(one: Tape, other: Tape) -> bool:
    """True where steps, contents and storages differ in numbers among arguments, and in sizes, alone."""
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


def _without_bytes(storage: Sequence[Any]) -> Any:
    birth, _, maker, device = storage
    return birth, maker, device


def _without_sizes(geometry: Sequence[Any]) -> Any:
    storage, _, size, _, dtype = geometry
    return storage, len(size), dtype


def _masks(tape: Tape) -> list[int]:
    """Contents of zeros and ones, which may be kept as bits."""
    return [content for content in range(len(tape.contents)) if mask_of(tape, content) is not None]


def _are_alike(one: TapeStep, other: TapeStep) -> bool:
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
