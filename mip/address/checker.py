"""Independent checker of address plans.

Shares no code with the solvers: it reads only the data types. One sweep over the buffers' lifetimes keeps the live
ones sorted by offset, so two live neighbours that overlap are found in O(n log n) comparisons. The first broken rule is
returned, in the order of `AddressRule`; a plan is valid when there is none.
"""

from __future__ import annotations

import bisect
import dataclasses
import enum

from memo.errors import PlanInvalid
from memo.mip.address.problem import AddressPlan, Buffer


class AddressRule(enum.StrEnum):
    """Rules of a valid plan."""

    SHAPE = "shape"
    """One offset for each buffer and one entry for each arena."""
    BOUNDS = "bounds"
    """Every buffer lies inside its arena, at an offset that is not negative."""
    ALIGNMENT = "alignment"
    """Every offset is a multiple of the buffer's and the problem's alignment, every arena of the problem's."""
    CAPACITY = "capacity"
    """No arena is larger than its capacity."""
    OVERLAP = "overlap"
    """Buffers of one arena whose lifetimes overlap share no byte."""
    BOUND = "bound"
    """No arena is smaller than the lower bound it claims."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AddressViolation:
    """A broken rule."""

    rule: AddressRule
    message: str
    buffers: tuple[str, ...] = ()
    """Ids of the buffers concerned: one, or two for an overlap."""


def require_valid(plan: AddressPlan) -> None:
    """Checks a plan before it is used.

    Raises:
        PlanInvalid: the plan breaks a rule; the message is of the first one.
    """
    violation = check(plan)
    if violation is not None:
        raise PlanInvalid(f"rule {violation.rule}: {violation.message}")


def check(plan: AddressPlan) -> AddressViolation | None:
    """Returns the first violation in the order of `AddressRule`, or None for a valid plan."""
    return _shape(plan) or _each_buffer(plan) or _each_arena(plan) or _overlap(plan)


def _shape(plan: AddressPlan) -> AddressViolation | None:
    buffers, offsets = plan.problem.buffers, plan.offsets
    if len(offsets) != len(buffers):
        return AddressViolation(rule=AddressRule.SHAPE, message=f"{len(offsets)} offsets for {len(buffers)} buffers")
    names = [arena.name for arena in plan.arenas]
    if sorted(names) != sorted({buffer.arena for buffer in buffers}):
        return AddressViolation(
            rule=AddressRule.SHAPE, message=f"the plan's arenas are {names}, not those of its buffers"
        )
    return None


def _each_buffer(plan: AddressPlan) -> AddressViolation | None:
    sizes = {arena.name: arena.nbytes for arena in plan.arenas}
    for buffer, offset in zip(plan.problem.buffers, plan.offsets, strict=True):
        size = sizes[buffer.arena]
        if offset < 0 or offset + buffer.nbytes > size:
            words = f"lies in bytes [{offset}, {offset + buffer.nbytes}) of an arena of {size}"
            return _one(AddressRule.BOUNDS, buffer, words)
        for alignment in (plan.problem.alignment, buffer.alignment):
            if offset % alignment:
                return _one(
                    AddressRule.ALIGNMENT, buffer, f"lies at {offset}, which is {offset % alignment} past {alignment}"
                )
    return None


def _each_arena(plan: AddressPlan) -> AddressViolation | None:
    for arena in plan.arenas:
        if arena.nbytes % plan.problem.alignment:
            words = f"arena {arena.name!r} of {arena.nbytes} bytes is not a multiple of {plan.problem.alignment}"
            return AddressViolation(rule=AddressRule.ALIGNMENT, message=words)
        capacity = plan.problem.capacities.get(arena.name)
        if capacity is not None and arena.nbytes > capacity:
            words = f"arena {arena.name!r} needs {arena.nbytes} bytes, {arena.nbytes - capacity} more than its capacity"
            return AddressViolation(rule=AddressRule.CAPACITY, message=words)
        if arena.nbytes < arena.lower_bound_nbytes:
            words = f"arena {arena.name!r} of {arena.nbytes} bytes claims a lower bound of {arena.lower_bound_nbytes}"
            return AddressViolation(rule=AddressRule.BOUND, message=words)
    return None


def _one(rule: AddressRule, buffer: Buffer, words: str) -> AddressViolation:
    return AddressViolation(rule=rule, message=f"buffer {buffer.id!r} {words}", buffers=(buffer.id,))


def _overlap(plan: AddressPlan) -> AddressViolation | None:
    for name in sorted({buffer.arena for buffer in plan.problem.buffers}):
        violation = _overlap_in(name, plan)
        if violation is not None:
            return violation
    return None


def _overlap_in(arena: str, plan: AddressPlan) -> AddressViolation | None:
    """Sweeps over time, ends before starts of an instant. `live` holds (offset, index) of disjoint byte ranges."""
    buffers, offsets = plan.problem.buffers, plan.offsets
    events = []
    for index, buffer in enumerate(buffers):
        if buffer.arena == arena and buffer.nbytes:
            events += [(buffer.start, 1, index), (buffer.end, 0, index)]
    live: list[tuple[int, int]] = []
    for time, begins, index in sorted(events):
        key = (offsets[index], index)
        at = bisect.bisect_left(live, key)
        if not begins:
            del live[at]
            continue
        for below, above in ((live[at - 1] if at else None, key), (key, live[at] if at < len(live) else None)):
            if below and above and below[0] + buffers[below[1]].nbytes > above[0]:
                return _two(plan, time, below[1], above[1])
        live.insert(at, key)
    return None


def _two(plan: AddressPlan, time: int, below: int, above: int) -> AddressViolation:
    lower, upper = plan.problem.buffers[below], plan.problem.buffers[above]
    shared = min(plan.offsets[below] + lower.nbytes, plan.offsets[above] + upper.nbytes) - plan.offsets[above]
    words = (
        f"buffers {lower.id!r} and {upper.id!r} are both live at {time} and share {shared} bytes "
        f"from offset {plan.offsets[above]} of arena {lower.arena!r}"
    )
    return AddressViolation(rule=AddressRule.OVERLAP, message=words, buffers=(lower.id, upper.id))
