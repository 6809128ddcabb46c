"""Layers of a GPT as a recorded step saves and holds them: what arithmetic is compared with."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

from memo.allocator import Allocation, AllocationTrace, BytelessMode
from memo.autoplan import points_of
from memo.gpt import GPTConfig, Precision, preset
from memo.gpt.arithmetic.block_bytes import BlockBytes, ElementSizes
from memo.mip.inputs import ATTENTION, MATMULS
from memo.parallel import Layout, simulated_rank
from memo.record import OffloadWithoutBytes, Recording, SavedRole, gpt_step, rank_step, record_step
from memo.swap import LayerCosts, find_layers

TOKENS, HIDDEN, HEADS, LAYERS = 1152, 128, 8, 3
MIDDLE = "layers.1"

ONE_RANK = Layout()


def shape(**others: Any) -> GPTConfig:
    sizes = {"vocab_size": 64, "max_seq": TOKENS, "layers": LAYERS, "hidden": HIDDEN, "heads": HEADS}
    return preset("tiny", **(sizes | others))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """Saved bytes and peak bytes of the middle layer, without its input and autocast's copies of weights."""

    saved: float
    forward: int
    backward: int


@functools.cache
def recorded(config: GPTConfig, precision: Precision, layout: Layout, batch: int = 1) -> Recorded:
    if layout == ONE_RANK:
        step = functools.partial(gpt_step, config, batch=batch, tokens=TOKENS, precision=precision)
        return measured(record_step(step, exact=True), precision)
    with simulated_rank(layout) as world:
        one = rank_step(config, world, batch=batch, tokens=TOKENS, precision=precision)
        return measured(record_step(one, exact=True), precision)


def measured(recording: Recording, precision: Precision) -> Recorded:
    trace = recording.trace
    own = [a for a in trace.allocations if a.phase == "forward" and in_middle(a) and not is_weight(a, precision)]
    end = max(a.lower for a in own) + 1
    back = [a for a in trace.allocations if a.group == f"{MIDDLE}.backward"]
    first, last = min(a.lower for a in back), max(a.upper for a in back)
    # What lives on until the step's end is a parameter's gradient.
    made = [a for a in trace.allocations if a.phase == "backward" and a.upper < trace.end]
    of_layers = [role for role in SavedRole if role not in (SavedRole.OUTSIDE, SavedRole.WEIGHTS)]
    return Recorded(
        saved=sum(recording.saved_nbytes[role] for role in of_layers) / LAYERS,
        forward=peak(clipped(own, 0, end)),
        backward=peak(clipped([*own, *made], first, last)),
    )


def costs_of(config: GPTConfig, precision: Precision, layout: Layout) -> LayerCosts:
    """Costs of one layer, as counted by the offloaded step of a rank."""
    with contextlib.ExitStack() as stack:
        if layout == ONE_RANK:
            build = functools.partial(gpt_step, config, batch=1, tokens=TOKENS, precision=precision)
        else:
            world = stack.enter_context(simulated_rank(layout))
            build = rank_step(config, world, batch=1, tokens=TOKENS, precision=precision)
        stack.enter_context(BytelessMode())
        step = build()
        layers = find_layers(step.model, step.layers)
        # In tiles and on many ranks nothing else is large; a mixture's counts and indices are to stay.
        least = 1 << (13 if config.moe is None else 16)
        manager = OffloadWithoutBytes(step.model, layers, alpha=0.5, min_bytes=least).manager
        with manager:
            step.loss()
        first, *others = manager.levels_profile()
    assert all(_sizes(cost) == _sizes(first) for cost in others)
    return first


def _sizes(cost: LayerCosts) -> list[tuple[str, int]]:
    return [(point.name, point.saved_bytes) for point in cost.points]


def assert_points_are_bounded(block: BlockBytes, cost: LayerCosts) -> None:
    """The block's points save and hold no less than those of the same name that a step records.

    But for a few numbers of a norm. A point of another name is bounded by the block's next one, which recomputes more.
    """
    points, tokens = {point.name: point for point in points_of(cost)}, cost.tokens
    assert points[ATTENTION].saved_bytes <= (block.always + block.at_attention) * tokens
    if MATMULS in points:
        assert points[MATMULS].saved_bytes <= (block.always + block.matmuls) * tokens
        assert points[MATMULS].beside_bytes <= block.beside * tokens
    held = max(block.held, block.forward_transient - block.backward_transient)  # at least what a forward holds
    assert max(point.held_bytes for point in points.values()) <= (held + 1) * tokens


def second_statistics(config: GPTConfig, precision: Precision) -> int:
    """Bytes of a token that the layer norms which are recorded in place of rmsnorms save in addition to these."""
    if config.norm != "rmsnorm":
        return 0
    return 2 * (2 * ElementSizes.of(precision).stream - 4)


def in_middle(allocation: Allocation) -> bool:
    return f"{allocation.tag.split(' ')[0]}.".startswith(f"{MIDDLE}.")


def is_weight(allocation: Allocation, precision: Precision) -> bool:
    """Autocast's copy of one: its size is no multiple of the tokens."""
    return (
        precision is Precision.BF16_AUTOCAST and allocation.size % (TOKENS // 4) != 0 and "_to_copy" in allocation.tag
    )


def clipped(allocations: Iterable[Allocation], first: int, last: int) -> list[Allocation]:
    return [
        dataclasses.replace(a, lower=max(a.lower, first), upper=min(a.upper, last))
        for a in allocations
        if a.lower < last and a.upper > first
    ]


def peak(allocations: Iterable[Allocation]) -> int:
    return AllocationTrace(allocations=tuple(allocations)).peak_nbytes
