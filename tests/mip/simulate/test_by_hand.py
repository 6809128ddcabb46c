"""The simulator on steps of two to four layers, against times and bytes worked out on paper."""

from __future__ import annotations

import dataclasses

import pytest
from activation_problems import layer as profile_layer, machine, profile_of
from simulated_steps import layer, rates, step

from memo.errors import PlanInvalid
from memo.events import Lane, StallCause, TierName, UseKind
from memo.mip.activation import ActivationPlan, ActivationProblem, Budgets, LayerPlan, Pipeline, predict_stages
from memo.mip.activation.simulator import layer_work, simulate
from memo.mip.inputs import MATMULS, EmbeddingOrHeadProfile, Pass, StaticBytes, Turn
from memo.mip.simulate import StageSimulation
from memo.mip.simulate.links import Queue, shares
from memo.mip.simulate.result import EndWork, Part
from memo.mip.simulate.stage import SimulatedStage

EXACT = 1e-9
OUT, IN = {Queue.HOST_OUT, Queue.DISK_OUT}, {Queue.HOST_IN, Queue.DISK_IN}


def copies(stage: StageSimulation, *queues: Queue) -> list[tuple[str, float, float]]:
    return [(one.module, one.start_s, one.end_s) for one in stage.copies if one.queue in queues]


def waits(stage: StageSimulation) -> list[tuple[StallCause, str, Lane, float, float]]:
    return [(one.cause, one.module, one.lane, one.start_s, one.end_s) for one in stage.waits]


def ways(stage: StageSimulation) -> list[UseKind]:
    return [usage.how for usage in stage.usages]


def test_keeping_everything_is_pure_compute() -> None:
    stage = step([layer(number, kept=10) for number in range(3)])
    assert stage.end_s == pytest.approx(3 * (1 + 2), abs=EXACT)
    assert not stage.waits
    assert not stage.copies
    assert stage.peak(TierName.DEVICE).nbytes == 30
    assert stage.peak(TierName.HOST).nbytes == 0
    assert ways(stage) == [UseKind.LIVE] * 3


def test_copies_that_fit_their_windows_cost_nothing() -> None:
    """F = 1, B = 2, 10 bytes at 10 a second each way: a copy takes one second of the next layer's forward."""
    stage = step([layer(number, host=10) for number in range(3)])
    assert copies(stage, Queue.HOST_OUT) == [("layers.0", 1, 2), ("layers.1", 2, 3)]
    assert copies(stage, Queue.HOST_IN) == [("layers.1", 3, 4), ("layers.0", 5, 6)]
    assert stage.end_s == pytest.approx(9, abs=EXACT)
    assert not stage.waits
    assert stage.peak(TierName.DEVICE).nbytes == 20  # the two rounding buffers
    assert stage.peak(TierName.HOST).nbytes == 20  # the last layer never leaves
    assert ways(stage) == [UseKind.LIVE, UseKind.PREFETCHED, UseKind.PREFETCHED]


def test_a_late_copy_out_stalls_before_the_layer_after_next() -> None:
    """15 bytes take 1.5 s. Layer 0 leaves from 1 to 2.5, layer 1 from then to 4: half a second of waiting for each."""
    stage = step([layer(number, host=15) for number in range(3)])
    assert copies(stage, Queue.HOST_OUT) == [("layers.0", 1, 2.5), ("layers.1", 2.5, 4)]
    assert waits(stage) == [
        (StallCause.DRAIN, "layers.0", Lane.D2H, 2, 2.5),
        (StallCause.DRAIN, "layers.1", Lane.D2H, 3.5, 4),
    ]
    assert stage.end_s == pytest.approx(10, abs=EXACT)


def test_a_late_reload_stalls_its_layer() -> None:
    """15 bytes come back in 3 s and have 2: layer 1 from 3 to 6 for 5, layer 0 from 6 to 9 for 8."""
    stage = step([layer(number, host=15) for number in range(3)], rates(d2h=15, h2d=5))
    assert copies(stage, Queue.HOST_IN) == [("layers.1", 3, 6), ("layers.0", 6, 9)]
    assert waits(stage) == [
        (StallCause.RELOAD, "layers.1", Lane.H2D, 5, 6),
        (StallCause.RELOAD, "layers.0", Lane.H2D, 8, 9),
    ]
    assert stage.end_s == pytest.approx(11, abs=EXACT)


def test_recompute_runs_between_reload_and_backward_and_lengthens_the_window() -> None:
    """As above with 1 s of recompute: it makes the window of the layer below 3 s, and that is enough."""
    stage = step([layer(number, host=15, recomputed=5, recompute_s=1) for number in range(3)], rates(d2h=15, h2d=5))
    assert not waits(stage)
    assert [(span.lane, span.module, span.start_s, span.end_s) for span in stage.spans[3:]] == [
        (Lane.RECOMPUTE, "layers.2", 3, 4),
        (Lane.COMPUTE, "layers.2", 4, 6),
        (Lane.RECOMPUTE, "layers.1", 6, 7),
        (Lane.COMPUTE, "layers.1", 7, 9),
        (Lane.RECOMPUTE, "layers.0", 9, 10),
        (Lane.COMPUTE, "layers.0", 10, 12),
    ]
    assert stage.recompute_s == pytest.approx(3, abs=EXACT)
    assert stage.peak(TierName.DEVICE).nbytes == 20 + 15  # a running layer, and what the one before it saves


def test_reloads_wait_for_room_on_the_device() -> None:
    """Backward holds 5 bytes more beside its layer's 10: under a budget of 24 the next layer's 10 do not fit beside it."""
    layers = [layer(number, host=10, transient=(0, 5)) for number in range(3)]
    roomy, tight = step(layers, device=25), step(layers, device=24)
    assert roomy.end_s == pytest.approx(9, abs=EXACT)
    assert roomy.peak(TierName.DEVICE).nbytes == 25
    assert tight.end_s == pytest.approx(11, abs=EXACT)
    assert waits(tight) == [
        (StallCause.RELOAD, "layers.1", Lane.H2D, 5, 6),
        (StallCause.RELOAD, "layers.0", Lane.H2D, 8, 9),
    ]
    assert ways(tight) == [UseKind.LIVE, UseKind.FETCHED, UseKind.FETCHED]
    assert tight.peak(TierName.DEVICE).nbytes == 20


@pytest.mark.parametrize(
    ("host", "disk", "seconds", "slowest"),
    [
        (10, 5, 1.5, Lane.D2H),  # 15 bytes over the link at 10; the disk is done after 1 s
        (5, 10, 2.0, Lane.DISK_WRITE),  # 10 bytes to a disk that takes 5 a second
        (0, 10, 2.0, Lane.DISK_WRITE),
    ],
)
def test_disk_bytes_cross_link_and_disk_at_the_slower_pace(host: int, disk: int, seconds: float, slowest: Lane) -> None:
    stage = step([layer(0, host=host, disk=disk), layer(1, forward_s=1)])
    assert max(one.end_s for one in stage.copies if one.queue in OUT) == pytest.approx(1 + seconds, abs=EXACT)
    assert waits(stage) == [(StallCause.DRAIN, "layers.0", slowest, 2, 1 + seconds)]
    assert stage.moved_nbytes(Lane.D2H) == host + disk
    assert stage.moved_nbytes(Lane.DISK_WRITE) == disk
    assert stage.peak(TierName.DISK).nbytes == disk


@pytest.mark.parametrize(
    ("d2h", "duplex", "expected"),
    [
        (10, 12, {Queue.HOST_OUT: 6, Queue.HOST_IN: 6}),  # both directions share 12
        (4, 12, {Queue.HOST_OUT: 4, Queue.HOST_IN: 8}),  # what one cannot use the other gets
        (10, 30, {Queue.HOST_OUT: 10, Queue.HOST_IN: 10}),
    ],
)
def test_both_directions_share_the_duplex_rate(d2h: float, duplex: float, expected: dict[Queue, float]) -> None:
    assert shares(rates(d2h=d2h, duplex=duplex), frozenset(expected)) == pytest.approx(expected, abs=EXACT)


def test_device_bytes_are_static_ends_kept_two_buffers_and_transients() -> None:
    """Three layers of 10, of which 4 are kept; F and B hold 3 and 6 more; embedding 2 saved and 1, head 50 saved and 7."""
    stage = SimulatedStage(
        [layer(number, kept=4, host=6, transient=(3, 6)) for number in range(3)],
        rates=rates(),
        static_nbytes=100,
        embedding=EndWork(name="embedding", saved_nbytes=2, transient_nbytes=1),
        head=EndWork(name="head", forward_s=1, backward_s=1, saved_nbytes=50, transient_nbytes=7),
    )
    stage.forward()
    assert stage.result().peak(TierName.DEVICE).nbytes == 100 + 2 + 4 + 4 + 10 + 50 + 7  # in the head: layer 2 is whole
    stage.backward()
    held = [one.nbytes for one in stage.result().occupancies if one.tier is TierName.DEVICE]
    assert 100 + 2 + 4 + 10 + 10 + 3 in held  # layer 2 forward: layer 0's kept, layers 1 and 2 whole
    assert 100 + 2 + 4 + 10 + 10 + 6 in held  # layer 2 backward, layer 1 coming back
    assert held[-1] == 100
    assert stage.result().peak(TierName.DEVICE).where == "head forward"


def test_microbatches_in_flight_hold_their_bytes_and_their_backwards_come_in_order() -> None:
    """Two microbatches of two layers, the last kept: two forwards, then two backwards."""
    stage = SimulatedStage([layer(0, host=10), layer(1, kept=1)], rates=rates())
    stage.forward()
    stage.forward()
    stage.backward()
    stage.backward()
    found = stage.result()
    assert copies(found, Queue.HOST_OUT) == [("layers.0", 1, 2), ("layers.0", 3, 4)]
    assert copies(found, Queue.HOST_IN) == [("layers.0", 4, 5), ("layers.0", 8, 9)]
    assert found.end_s == pytest.approx(2 * (2 + 4), abs=EXACT)
    assert found.peak(TierName.HOST).nbytes == 20


def test_a_last_layer_leaves_once_another_microbatch_begins() -> None:
    """One layer a stage: its copy waits for the next forward (1 to 2), and comes back while the first backward runs."""
    stage = SimulatedStage([layer(0, host=10)], rates=rates())
    stage.forward()
    stage.forward()
    stage.forward()
    for _ in range(3):
        stage.backward()
    found = stage.result()
    assert [(one.call, one.start_s, one.end_s) for one in found.copies if one.queue in OUT] == [(0, 1, 2), (1, 2, 3)]
    # Microbatch 0 is fetched when its backward asks for it and waited for; microbatch 1 meanwhile; 2 never left.
    assert [(one.call, one.start_s, one.end_s) for one in found.copies if one.queue in IN] == [(0, 3, 4), (1, 4, 5)]
    assert found.end_s == pytest.approx(3 + 1 + 3 * 2, abs=EXACT)
    assert ways(found) == [UseKind.FETCHED, UseKind.PREFETCHED, UseKind.LIVE]


def test_bytes_for_a_link_that_is_not_there_are_refused() -> None:
    with pytest.raises(PlanInvalid, match=r"layers\.0 moves 10 B to disk, where the hardware has no bandwidth"):
        step([layer(0, disk=10), layer(1)], rates(write=0))


def test_what_a_recompute_holds_is_there_in_the_first_half_of_a_split_backward_alone() -> None:
    work = layer(0, kept=100, recompute_s=1, transient=(0, 10), recompute_held=50)
    turns = [Turn(chunk=0, kind=kind, microbatch=0) for kind in (Pass.FORWARD, Pass.INPUT, Pass.WEIGHT)]
    stage = SimulatedStage([work], rates=rates(), turns=turns)
    stage.forward()
    for most in (100 + 10 + 50, 100 + 10):
        begin = len(stage.result().occupancies)
        stage.backward()
        assert max(one.nbytes for one in stage.result().occupancies[begin:]) == most


def test_a_plan_becomes_whole_bytes_and_nothing_is_lost() -> None:
    """100 always, 11 other, 100 of 200 at the point: 211 of 311, a third of them on the host."""
    known = profile_layer(always=100, other_bytes=11, all=200, matmuls=(100, 2.0), attention=None)
    known = dataclasses.replace(known, forward_transient_bytes=70, backward_transient_bytes=30)
    half = LayerPlan(point=MATMULS, kept=0.5, host=1 / 3, disk=1 / 6)
    work = layer_work("layers.0", known, half)
    assert dict(work.nbytes) == {Part.KEPT: 105, Part.HOST: 70, Part.DISK: 35, Part.RECOMPUTED: 101}
    assert work.recompute_s == 2
    assert (work.forward_transient_nbytes, work.backward_transient_nbytes) == (70, 30)
    assert work.recompute_held_nbytes == 70 - 30  # a recompute is a forward
    assert layer_work("layers.0", known, LayerPlan()).backward_transient_nbytes == 30


def test_each_stage_has_its_layers_and_ends() -> None:
    """Two stages of a layer: the first has the embedding, the second the head; the optimizer runs when both are through."""
    known = profile_layer(
        always=10, all=0, matmuls=None, attention=None, forward_s=1, backward_s=2, static=StaticBytes(other=1000)
    )
    profile = profile_of(
        dataclasses.replace(known, name="one"),
        dataclasses.replace(known, name="two", static=StaticBytes(other=2000)),
        embedding=EmbeddingOrHeadProfile(forward_s=3, backward_s=5, static=StaticBytes(other=100), saved_bytes=1),
        head=EmbeddingOrHeadProfile(
            forward_s=7, backward_s=11, static=StaticBytes(other=200), saved_bytes=2, transient_bytes=4
        ),
        optimizer_s=13,
    )
    problem = ActivationProblem(
        profile=profile,
        hardware=machine(),
        budgets=Budgets(device_bytes=1 << 40),
        pipeline=Pipeline(stages=2, microbatches=1),
    )
    plans = (LayerPlan(), LayerPlan())
    found = simulate(ActivationPlan(problem=problem, layers=plans, stages=predict_stages(problem, plans)))
    assert [stage.occupancies[0].nbytes for stage in found.stages] == [1100, 2200]
    assert [stage.peak(TierName.DEVICE).nbytes for stage in found.stages] == [1100 + 1 + 10, 2200 + 10 + 2 + 4]
    forward_s, backward_s = (3 + 1) + (1 + 7), (11 + 2) + (2 + 5)
    assert found.step_s == pytest.approx(forward_s + backward_s + 13, abs=EXACT)
    idle_s = [stage.end_s - stage.compute_s - stage.communication_s - stage.stall_s for stage in found.stages]
    assert idle_s == [pytest.approx(8 + 13), pytest.approx(4)]
