"""Microbatches that a rank holds of each chunk at a time: small orders by hand, and what is known of schedules."""

from __future__ import annotations

import collections
import dataclasses

import pytest

from memo.errors import PlanError
from memo.mip.activation import Pipeline, StageTurns, in_flight_within, peak_in_flight
from memo.mip.activation.in_flight import SchedulePoint, TurnCopy, copies_between_turns, moments_of
from memo.mip.inputs import Pass, PipelineSchedule, Turn
from memo.mip.inputs.pipeline_schedules import rank_turns

TWO = [schedule for schedule in PipelineSchedule if schedule.default_chunks > 1]


def turns(order: str) -> tuple[Turn, ...]:
    """`0F0 1B0` is chunk, kind, microbatch."""
    return tuple(Turn(chunk=int(w[0]), kind=Pass(w[1]), microbatch=int(w[2:])) for w in order.split())


def test_two_chunks_are_counted_at_one_time_and_not_each_at_its_fullest() -> None:
    """The first chunk is fullest when the second has none yet."""
    order = turns("0F0 0F1 0F2 0B0 0B1 1F0 1F1 1B0 1B1 0B2 1F2 1B2")
    assert peak_in_flight(order, 2) == ((3, 0), (1, 2))


def test_a_call_is_held_until_the_second_half_of_its_backward() -> None:
    order = turns("0F0 0F1 0I0 0I1 0W0 0W1 1F0 1B0 1F1 1B1")
    assert peak_in_flight(order, 2) == ((2, 0), (0, 1))
    between = {moment.between[0] for moment in moments_of(order, 2) if moment.kind is Pass.INPUT}
    assert between == {0, 1}, "while the second input half runs, the first call waits for its weights' half"


def test_the_last_layer_of_the_forward_that_ran_last_stands_until_another_begins() -> None:
    order = turns("0F0 1F0 1B0 0B0")
    whole = {(moment.chunk, moment.waiting, moment.whole_chunk) for moment in moments_of(order, 2)}
    assert whole == {(0, (0, 0), None), (1, (1, 0), 0), (1, (1, 0), None)}


def test_what_comes_next_is_read_ahead_and_waits_through_the_forwards_in_between() -> None:
    order = turns("0F0 0F1 0F2 0B0 1F0 0B1 1B0 0B2 1F1 1B1 1F2 1B2")
    ahead = [moment for moment in moments_of(order, 2) if moment.ahead == (0, False)]
    assert [(moment.chunk, moment.kind) for moment in ahead] == [
        (0, Pass.BACKWARD),
        (1, Pass.FORWARD),
        (1, Pass.BACKWARD),
    ]
    assert all(moment.waiting[0] >= 1 for moment in ahead)


def test_a_second_half_is_read_ahead_also_where_no_forward_came_after_its_own() -> None:
    order = turns("0F0 1F0 1I0 0I0 1W0 0W0")
    assert any(moment.chunk == 0 and moment.ahead == (1, True) for moment in moments_of(order, 2))


def test_a_copy_has_the_neighbouring_turn_for_its_window() -> None:
    order = turns("0F0 0F1 1F0 1B0 0B0 1F1 1B1 0B1")
    found = {(s.turn, s.hidden_by): s.times for s in copies_between_turns(order)}
    assert found == {
        ((0, Pass.FORWARD), (0, Pass.FORWARD)): 1,
        ((0, Pass.FORWARD), (1, Pass.FORWARD)): 1,
        ((0, Pass.BACKWARD), (1, Pass.BACKWARD)): 2,
    }, "each forward of the second chunk is followed by its own backward: nothing of it ever goes"


def test_what_went_after_the_backward_before_has_no_window() -> None:
    order = turns("0F0 0F1 0B0 0F2 1F0 1B0 0B2 0B1 1F1 1B1 1F2 1B2")
    assert TurnCopy(turn=(0, Pass.BACKWARD), hidden_by=None, times=1) in copies_between_turns(order)


@pytest.mark.parametrize("ranks", [2, 4])
def test_one_chunk_read_turn_by_turn_is_the_closed_form(ranks: int) -> None:
    for schedule in (PipelineSchedule.ONE_F_ONE_B, PipelineSchedule.GPIPE):
        pipeline = Pipeline(stages=ranks, microbatches=6, schedule=schedule)
        for rank in range(ranks):
            order = rank_turns(schedule, ranks=ranks, rank=rank, microbatches=6)
            closed, backward = pipeline.moments(rank)
            assert backward == dataclasses.replace(closed, kind=Pass.BACKWARD)
            assert max(moment.waiting for moment in moments_of(order, 1)) == closed.waiting
            assert peak_in_flight(order, 1) == pipeline.peak_in_flight(rank)
            assert closed.whole_chunk == (None if closed.waiting == (0,) else 0)


@pytest.mark.parametrize("schedule", TWO)
def test_moments_leave_nothing_out(schedule: PipelineSchedule) -> None:
    """Counted once more, without states or dominance."""
    for rank in range(4):
        order = rank_turns(schedule, ranks=4, rank=rank, microbatches=12)
        moments, held = moments_of(order, 2), collections.Counter[int]()
        seen = set()
        for turn in order:
            held[turn.chunk] += turn.kind is Pass.FORWARD
            seen.add((held[0], held[1]))
            held[turn.chunk] -= turn.kind in (Pass.BACKWARD, Pass.WEIGHT)
        assert all(any(m.held[0] >= a and m.held[1] >= b for m in moments) for a, b in seen)
        assert {m.held for m in moments} <= seen
        assert sum(max(seen)) >= 2


def test_an_order_that_holds_no_more_is_known_from_one_that_does() -> None:
    def of(microbatches: int, schedule: PipelineSchedule = PipelineSchedule.INTERLEAVED) -> tuple[Turn, ...]:
        return rank_turns(schedule, ranks=2, rank=0, microbatches=microbatches)

    assert in_flight_within(of(8), of(16), chunks=2)
    assert not in_flight_within(of(8), of(2), chunks=2)
    assert not in_flight_within(of(8, PipelineSchedule.ZERO_BUBBLE), of(8), chunks=2)


@pytest.mark.parametrize(
    ("order", "words"),
    [
        ("0F0 0F0 0B0 1F0 1B0", "0F0 is out of order"),
        ("0F0 0W0 1F0 1B0", "0W0 is out of order"),
        ("0F0 0B0 2F0 2B0", "2F0 is out of order"),
        ("0F0 0B0 1F0", "or have no backward"),
        ("0F0 0B0 0F1 0B1 1F0 1B0", "or have no backward"),
        ("0F0 0I0 1F0 1B0", "or have no backward"),
    ],
)
def test_turns_that_are_no_step_are_refused(order: str, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        StageTurns(layers=(1, 1), turns=turns(order))


def test_a_moment_counts_the_running_microbatch_as_held() -> None:
    moment = SchedulePoint(chunk=1, kind=Pass.INPUT, waiting=(2, 0), between=(0, 1))
    assert moment.held == (2, 2)
