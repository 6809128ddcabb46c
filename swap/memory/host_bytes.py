"""Bytes of host arena that a step's claims need, found without an arena: to prove a plan before it is used.

The claims are placed as the host tier places them (memo.swap.tiers): in whole pages, by first fit in the first step, and in
later ones by the layout that is planned of the first. It owns no memory.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from memo.swap.memory.free_list import FreeList
from memo.swap.memory.page_aligned import PAGE_BYTES, whole_pages
from memo.swap.memory.planned_layout import StepRecorder

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """A claim of one step and its half-open lifetime, in any unit of time of that step."""

    nbytes: int
    start: int
    end: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HostBytes:
    """Bytes of addresses, in whole pages, from the begin of the arena to the end of its last block."""

    first_step: int
    """Bytes by first fit."""
    later_steps: int
    """Bytes by the layout that is planned of the first step."""


def claims_in_turn(sizes: Sequence[int]) -> list[Claim]:
    """The claims of one forward, all of which backward releases, the last one first."""
    end = 2 * len(sizes)
    return [Claim(nbytes=nbytes, start=at, end=end - at) for at, nbytes in enumerate(sizes)]


def host_bytes_needed(claims: Sequence[Claim]) -> HostBytes:
    """Returns the bytes of host arena that steps with these claims need.

    At one time, releases come before claims. A tier with a budget of `first_step` has room for all claims of all steps.
    """
    recorder = StepRecorder()
    first = _step(recorder, claims, sum(whole_pages(claim.nbytes) for claim in claims))
    recorder.end_step(PAGE_BYTES, first)
    return HostBytes(first_step=first, later_steps=_step(recorder, claims, first))


def _step(recorder: StepRecorder, claims: Sequence[Claim], capacity: int) -> int:
    """Places and releases one step's claims; returns the end of the last block."""
    space, end = FreeList(capacity, align=PAGE_BYTES), 0
    held: dict[int, tuple[int, int]] = {}
    releases = [(claim.end, 0, at) for at, claim in enumerate(claims)]
    for _, is_claim, at in sorted([*releases, *((claim.start, 1, at) for at, claim in enumerate(claims))]):
        if is_claim:
            number, offset = recorder.find(space, claims[at].nbytes)
            assert offset is not None  # `capacity` has room for all
            recorder.placed(number, offset)
            held[at] = number, offset
            end = max(end, offset + whole_pages(claims[at].nbytes))
        else:
            number, offset = held.pop(at)
            space.free(offset)
            recorder.release(number, recorder.step)
    return end
