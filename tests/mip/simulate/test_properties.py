"""Properties of every simulated step: bounds from below, budgets, link rates, order of states, determinism."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math

from hypothesis import given, settings, strategies as st
from simulated_steps import rates, step

from memo.events import Lane, TensorState, TierName
from memo.mip.inputs.hardware import LaneRates
from memo.mip.simulate import StageSimulation
from memo.mip.simulate.links import Copy, Queue
from memo.mip.simulate.result import LayerWork, Part
from memo.mip.simulate.stage import SimulatedStage

SLACK = 1 + 1e-9
nbytes = st.integers(0, 1000)
seconds = st.floats(0, 10).map(lambda value: round(value, 3))
speed = st.floats(1, 1000).map(lambda value: round(value, 2))


@st.composite
def layer_works(draw: st.DrawFn) -> LayerWork:
    return LayerWork(
        name=f"layers.{draw(st.integers(0, 99))}",
        forward_s=draw(seconds),
        backward_s=draw(seconds),
        recompute_s=draw(seconds),
        nbytes={part: draw(nbytes) for part in Part},
        forward_transient_nbytes=draw(nbytes),
        backward_transient_nbytes=draw(nbytes),
    )


@st.composite
def lane_rates(draw: st.DrawFn) -> LaneRates:
    return rates(d2h=draw(speed), h2d=draw(speed), duplex=draw(speed), write=draw(speed), read=draw(speed))


quick = settings(max_examples=60, deadline=None)
works = st.lists(layer_works(), min_size=1, max_size=5)
orders = st.integers(1, 3).flatmap(lambda ahead: st.tuples(st.just(ahead), st.integers(ahead, 4)))


def play(
    layers: list[LayerWork], links: LaneRates, order: tuple[int, int], device: int | None = None
) -> StageSimulation:
    """One stage's 1F1B: `ahead` forwards, then a backward and a forward in turn, `microbatches` of each."""
    ahead, microbatches = order
    stage = SimulatedStage(layers, rates=links, budgets=None if device is None else {TierName.DEVICE: device})
    for turn in range(microbatches + ahead):
        if turn < microbatches:
            stage.forward()
        if turn >= ahead - 1 and turn - ahead + 1 < microbatches:
            stage.backward()
    return stage.result()


def close(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-9)


@quick
@given(works, lane_rates(), orders)
def test_the_step_is_compute_recompute_and_stalls(
    layers: list[LayerWork], links: LaneRates, order: tuple[int, int]
) -> None:
    stage = play(layers, links, order)
    assert close(stage.compute_s, order[1] * sum(layer.forward_s + layer.backward_s for layer in layers))
    assert close(stage.end_s, stage.compute_s + stage.recompute_s + stage.stall_s)
    assert stage.recompute_s <= order[1] * sum(layer.recompute_s for layer in layers) * SLACK


@quick
@given(works, lane_rates())
def test_no_step_is_shorter_than_its_copies(layers: list[LayerWork], links: LaneRates) -> None:
    """Out: after the first forward, before the head. In: after that, before the first layer's backward."""
    stage = step(layers, links)
    out = sum(copy.nbytes for copy in stage.copies if copy.queue.out)
    back = sum(copy.nbytes for copy in stage.copies if not copy.queue.out)
    write = sum(copy.nbytes for copy in stage.copies if copy.queue is Queue.DISK_OUT)
    assert out == back == sum(layer.of(Part.HOST) + layer.of(Part.DISK) for layer in layers[:-1])
    out_s = max(out / links.d2h_bytes_per_s, write / links.disk_write_bytes_per_s, out / links.duplex_bytes_per_s)
    back_s = max(back / links.h2d_bytes_per_s, write / links.disk_read_bytes_per_s, back / links.duplex_bytes_per_s)
    end_s = layers[0].forward_s + out_s + back_s + layers[0].backward_s
    assert stage.end_s * SLACK >= end_s * (len(layers) > 1)


@quick
@given(works, lane_rates(), orders)
def test_no_link_carries_more_than_its_rate(layers: list[LayerWork], links: LaneRates, order: tuple[int, int]) -> None:
    stage = play(layers, links, order)
    for lane, rate in (
        (Lane.D2H, links.d2h_bytes_per_s),
        (Lane.H2D, links.h2d_bytes_per_s),
        (Lane.DISK_WRITE, links.disk_write_bytes_per_s),
        (Lane.DISK_READ, links.disk_read_bytes_per_s),
    ):
        assert_within(rate, [copy for copy in stage.copies if lane in copy.queue.lanes])
    assert_within(links.duplex_bytes_per_s, list(stage.copies))


def assert_within(rate: float, copies: list[Copy]) -> None:
    """In every window, the copies wholly inside it are no more bytes than the link carries in that time."""
    for start_s, end_s in itertools.product({c.start_s for c in copies}, {c.end_s for c in copies}):
        inside = sum(c.nbytes for c in copies if start_s <= c.start_s and c.end_s <= end_s)
        assert inside <= rate * max(0.0, end_s - start_s) * SLACK + 1e-6


@quick
@given(works, lane_rates(), orders)
def test_copies_of_a_queue_keep_their_order(layers: list[LayerWork], links: LaneRates, order: tuple[int, int]) -> None:
    stage = play(layers, links, order)
    for queue in Queue:
        of_queue = [copy for copy in stage.copies if copy.queue is queue]
        assert all(copy.issued_s <= copy.start_s <= copy.end_s for copy in of_queue)
        assert all(one.end_s <= other.start_s for one, other in itertools.pairwise(of_queue))


@quick
@given(works, lane_rates(), st.integers(1, 3), st.integers(0, 4000))
def test_prefetch_never_breaks_a_budget_that_holds_without_it(
    layers: list[LayerWork], links: LaneRates, microbatches: int, more: int
) -> None:
    """With no budget to fit in, nothing is prefetched: that peak cannot be avoided. Any budget above it is kept.

    Not so where a forward follows a backward: what is prefetched for the backward after it stands beside that forward.
    """
    order = (microbatches, microbatches)
    least = play(layers, links, order, device=0).peak(TierName.DEVICE).nbytes
    assert play(layers, links, order, device=least + more).peak(TierName.DEVICE).over_nbytes == 0


@quick
@given(works, lane_rates())
def test_lower_tiers_hold_all_layers_but_the_last(layers: list[LayerWork], links: LaneRates) -> None:
    stage = step(layers, links)
    assert stage.peak(TierName.HOST).nbytes == sum(layer.of(Part.HOST) for layer in layers[:-1])
    assert stage.peak(TierName.DISK).nbytes == sum(layer.of(Part.DISK) for layer in layers[:-1])


@quick
@given(works, lane_rates(), orders)
def test_every_byte_is_given_back(layers: list[LayerWork], links: LaneRates, order: tuple[int, int]) -> None:
    stage = play(layers, links, order)
    last = {occupancy.tier: occupancy.nbytes for occupancy in stage.occupancies}
    assert set(last.values()) <= {0}
    assert all(occupancy.nbytes >= 0 for occupancy in stage.occupancies)


LEGAL = {
    Part.KEPT: {(TensorState.LIVE, TensorState.GONE)},
    Part.RECOMPUTED: {
        (TensorState.LIVE, TensorState.GONE),
        (TensorState.LIVE, TensorState.GONE, TensorState.LIVE, TensorState.GONE),
    },
}
MOVED = {(TensorState.LIVE, TensorState.GONE), tuple(TensorState)}


@quick
@given(works, lane_rates(), orders)
def test_every_part_goes_through_its_states_in_order(
    layers: list[LayerWork], links: LaneRates, order: tuple[int, int]
) -> None:
    stage = play(layers, links, order)
    lives: dict[tuple[int, Part], list[TensorState]] = collections.defaultdict(list)
    for change in stage.transitions:
        lives[change.call, change.part].append(change.to)
    for (_, part), states in lives.items():
        assert tuple(states) in LEGAL.get(part, MOVED)
    assert len(lives) == order[1] * sum(layer.of(part) > 0 for layer in layers for part in Part)


@quick
@given(works, lane_rates(), st.floats(1, 10), st.sampled_from(["d2h_bytes_per_s", "h2d_bytes_per_s"]))
def test_a_faster_link_never_makes_a_longer_step(
    layers: list[LayerWork], links: LaneRates, faster: float, name: str
) -> None:
    """The other links being as they are; the disk's copies wait for nobody but the link."""
    quicker = dataclasses.replace(links, **{name: getattr(links, name) * faster})
    assert step(layers, quicker).end_s <= step(layers, links).end_s * SLACK


@quick
@given(works, lane_rates(), orders)
def test_the_same_step_is_the_same_to_the_last_bit(
    layers: list[LayerWork], links: LaneRates, order: tuple[int, int]
) -> None:
    assert play(layers, links, order) == play(layers, links, order)


@quick
@given(works, lane_rates(), orders)
def test_a_step_that_keeps_everything_is_pure_compute(
    layers: list[LayerWork], links: LaneRates, order: tuple[int, int]
) -> None:
    kept = [dataclasses.replace(layer, nbytes={Part.KEPT: layer.saved_nbytes}, recompute_s=0) for layer in layers]
    stage = play(kept, links, order)
    assert close(stage.end_s, order[1] * sum(layer.forward_s + layer.backward_s for layer in layers))
    assert not stage.copies
