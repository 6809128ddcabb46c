"""Parts of a replay: steps that share nothing but what is kept need not run at the same time.

    input = norm = q, k, v - rotary = attention #     out - sum = norm = gate, up = product
    `-------- first part --------'                    `------ second part ------'

Backward goes through a transformer's MLP before its attention. Queries, keys and values are made again when attention asks
for them, and by then what the MLP had saved is gone: a layer's backward never holds all that the layer saved.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import TYPE_CHECKING

from memo.swap.levels import least_part_nbytes
from memo.swap.recompute.tape.plan import plan_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from memo.swap.recompute.tape.plan import Plan


def parts_of(plan: Plan, together: frozenset[int] = frozenset()) -> tuple[Plan, ...]:
    """Plans that give the same as `plan`, each of which may run when backward first asks for something that it gives.

    Args:
        plan: of a layer's call.
        together: numbers of steps that must not be divided: collectives, in which other ranks take part.
    """
    found = plan.parts.get(together)
    if found is None:
        found = plan.parts[together] = _divided(plan, together)
    return found


def held_and_absent(plan: Plan) -> tuple[int, int]:
    """Bytes that a plan's parts hold, at most, beside what autograd saved, and bytes of that which are absent all the while.

    While what one part gives is used, those that run later have given nothing, and of those that ran before all is gone; not
    so where backward uses what two of them give by turns.
    """
    parts = parts_of(plan)
    saves = [[plan.tape.saved_after[storage] for storage in part.wanted] for part in parts]
    spans = sorted((min(first for first, _ in each), max(last for _, last in each)) for each in saves)
    if any(before[1] >= after[0] for before, after in itertools.pairwise(spans)):
        return plan.held_bytes, 0
    given = [part.given_nbytes for part in parts]
    largest = max(given)
    held = max(part.held_bytes - (largest - own) for part, own in zip(parts, given, strict=True))
    return max(0, held), sum(given) - largest


def _divided(plan: Plan, together: frozenset[int]) -> tuple[Plan, ...]:
    least = least_part_nbytes(plan.given_nbytes)
    if plan.given_nbytes < 2 * least:
        return (plan,)
    parts: list[tuple[set[int], list[int]]] = []
    room = 0.0
    for steps, wanted in _connected(plan, together):
        if not parts or room <= 0:
            parts.append((set(), []))
            room = least
        parts[-1][0].update(steps)
        parts[-1][1].extend(wanted)
        room -= sum(plan.tape.storages[storage][1] for storage in wanted)
    if len(parts) > 1 and room > 0:  # the last one is small
        steps, wanted = parts.pop()
        parts[-1][0].update(steps)
        parts[-1][1].extend(wanted)
    if len(parts) == 1:
        return (plan,)
    return tuple(
        plan_of(plan.tape, dataclasses.replace(plan.cut, replayed=frozenset(steps)), plan.sources, sorted(wanted))
        for steps, wanted in parts
    )


def _connected(plan: Plan, together: frozenset[int]) -> Iterator[tuple[set[int], list[int]]]:
    """Groups of steps that share only what is kept, in the order of their first steps, with the storages that they give."""
    tape, kept = plan.tape, plan.cut.kept
    groups: dict[int, set[int]] = {number: {number} for number in plan.steps}
    user: dict[int, int] = {}  # content -> a step that makes or reads it
    for number in plan.steps:
        used = (*tape.steps[number].reads, *tape.steps[number].makes)
        joined = [user.setdefault(content, number) for content in used if content not in kept]
        if number in together:
            joined.append(next(other for other in plan.steps if other in together))
        for other in joined:
            if groups[other] is not groups[number]:
                merged = groups[other] | groups[number]
                groups.update(dict.fromkeys(merged, merged))
    wanted: dict[int, list[int]] = {id(group): [] for group in groups.values()}
    for storage in plan.wanted:
        content = tape.last[storage]
        made_by = tape.contents[content].writer
        if content in kept:  # zeros and ones, which a step that reads them unpacks
            readers = (number for number in plan.steps if content in tape.steps[number].reads)
            made_by = next(readers, plan.steps[0])
        wanted[id(groups[made_by])].append(storage)
    for group in {id(group): group for group in groups.values()}.values():
        yield group, wanted[id(group)]
