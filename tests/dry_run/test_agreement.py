"""Each kind of disagreement is found, and names the rank, the collective and both figures."""

from __future__ import annotations

import dataclasses

import pytest

from memo.dry_run.agreement import PEAK, STATES, against_plan, among_ranks, memberships, memory, moved_to
from memo.dry_run.places import Place
from memo.dry_run.recorded_collectives import CollectiveCall
from memo.gpt.arithmetic import Collective, CollectiveKind, Ranks
from memo.parallel import Layout

LAYOUT = Layout(dp=2, tp=2, pp=2)
GATHER = Collective(kind=CollectiveKind.ALL_GATHER, ranks=Ranks.TENSOR, nbytes=64, count=2)


def place(rank: int) -> Place:
    return Place.of(LAYOUT, rank)


def call(rank: int, **changes: object) -> CollectiveCall:
    whole = CollectiveCall(
        kind=CollectiveKind.ALL_GATHER,
        ranks=place(rank).group(Ranks.TENSOR),
        nbytes=64,
        shape=(16,),
        dtype="bfloat16",
    )
    return dataclasses.replace(whole, **changes)  # type: ignore[arg-type]


def message(rank: int, to: int, kind: CollectiveKind) -> CollectiveCall:
    return call(rank, kind=kind, ranks=place(rank).group(Ranks.STAGES), peer=to)


def test_what_is_issued_as_planned_agrees() -> None:
    assert against_plan(place(5), [call(5), call(5)], [GATHER]) == []


@pytest.mark.parametrize(
    ("issued", "said"),
    [
        ([call(5)], "the step issues 1, the plan counts 2"),
        ([call(5)] * 3, "the step issues 3, the plan counts 2"),
        (
            [call(5), call(5, nbytes=32)],
            "all-gather of 32 bytes over tp (2 ranks): the step issues 1, the plan counts 0",
        ),
        ([call(5), call(5, kind=CollectiveKind.ALL_REDUCE)], "all-reduce of 64 bytes"),
        ([call(5), call(5, ranks=(0, 5))], "over ranks [0, 5]: the step issues 1, the plan counts 0"),
    ],
)
def test_a_collective_that_the_plan_does_not_count_is_named(issued: list[CollectiveCall], said: str) -> None:
    wrong = against_plan(place(5), issued, [GATHER])
    assert all(line.startswith("rank 5: ") for line in wrong)
    assert any(said in line for line in wrong), wrong


def test_recompute_may_repeat_as_many_bytes_as_the_plan_says_and_no_more() -> None:
    again = dataclasses.replace(GATHER, nbytes=40, count=1)
    piece = call(5, nbytes=20)
    assert against_plan(place(5), [call(5), call(5), piece, piece], [GATHER], [again]) == []
    assert against_plan(place(5), [call(5), call(5), piece, piece, piece], [GATHER], [again])
    assert against_plan(place(5), [call(5)], [GATHER], [again])  # fewer are not excused


@pytest.mark.parametrize("changed", [{"shape": (8,)}, {"dtype": "float32"}, {"kind": CollectiveKind.ALL_REDUCE}])
def test_members_that_issue_others_would_hang(changed: dict[str, object]) -> None:
    calls = {4: [call(4), call(4)], 5: [call(5), call(5)]}
    assert among_ranks(calls) == []
    (wrong,) = among_ranks({4: calls[4], 5: [call(5), call(5, **changed)]})
    assert wrong.startswith("rank 5: collective 1 of its group [4, 5] is ")
    assert "on rank 4 all-gather of bfloat16 [16]; they would wait" in wrong


def test_members_that_issue_fewer_would_hang() -> None:
    (wrong,) = among_ranks({4: [call(4), call(4)], 5: [call(5)]})
    assert "rank 5: collective 1 of its group [4, 5] is nothing" in wrong


def test_messages_that_nobody_receives_or_sends_are_named() -> None:
    sends, receives = message(1, 5, CollectiveKind.SEND), message(5, 1, CollectiveKind.RECEIVE)
    assert among_ranks({1: [sends], 5: [receives]}) == []
    (wrong,) = among_ranks({1: [sends], 5: []})
    assert wrong == "rank 1: message 0 to rank 5 is bfloat16 [16], and that rank expects nothing"
    (wrong,) = among_ranks({1: [sends], 5: [receives, receives]})
    assert "message 1 to rank 5 is nothing" in wrong
    (wrong,) = among_ranks({1: [sends], 5: [dataclasses.replace(receives, shape=(4,))]})
    assert "expects bfloat16 [4]" in wrong


def test_calls_move_to_another_ranks_groups_and_peers() -> None:
    moved = moved_to([call(0), message(0, 4, CollectiveKind.SEND)], place(0), place(3))
    assert [each.ranks for each in moved] == [(2, 3), (3, 7)]
    assert moved[1].peer == 7


def test_a_group_with_other_ranks_than_its_place_says_is_named() -> None:
    assert memberships(place(6), {Ranks.TENSOR: [6, 7], Ranks.REPLICAS: [4, 6]}) == []
    (wrong,) = memberships(place(6), {Ranks.REPLICAS: [5, 6]})
    assert wrong == "rank 6: its group dp x cp has the ranks [5, 6], and by its place [4, 6]"


def test_more_memory_than_planned_is_named() -> None:
    planned = 100 << 30
    assert memory({3: planned, 5: planned // 2}, planned, PEAK, stage=1) == []
    (wrong,) = memory({3: planned, 5: planned * 11 // 10}, planned, PEAK, stage=1)
    assert wrong == "rank 5: its step holds 110 GiB on the device, the plan says 100 GiB of stage 1"


def test_less_memory_than_planned_on_the_fullest_rank_is_named() -> None:
    planned = 100 << 30
    (wrong,) = memory({3: planned // 2, 5: planned // 4}, planned, PEAK, stage=1)
    assert wrong == "rank 3: its step holds 50 GiB on the device, the plan says 100 GiB of stage 1"
    assert memory({3: planned * 985 // 1000}, planned, PEAK, stage=0) == []
    (wrong,) = memory({3: planned * 985 // 1000}, planned, STATES, stage=0, what="its states are")
    assert wrong == "rank 3: its states are 98.5 GiB on the device, the plan says 100 GiB of stage 0"


def test_places_are_those_of_the_layouts_formula() -> None:
    layout = Layout(dp=2, tp=2, pp=3, cp=2)
    assert [Place.of(layout, rank).rank for rank in range(layout.ranks)] == list(range(layout.ranks))
    groups = (Ranks.TENSOR, Ranks.CONTEXT, Ranks.REPLICAS, Ranks.TOKENS, Ranks.STAGES, Ranks.ENDS)
    found = {name: Place.of(layout, 11).group(name) for name in groups}
    assert found == {
        Ranks.TENSOR: (10, 11),
        Ranks.CONTEXT: (9, 11),
        Ranks.REPLICAS: (9, 11, 13, 15),
        Ranks.TOKENS: tuple(range(8, 16)),
        Ranks.STAGES: (3, 11, 19),
        Ranks.ENDS: (3, 19),
    }
