"""Ranks share a sequence: every token is on one rank, in the order that its layout says."""

from __future__ import annotations

import pytest
import torch

from memo.parallel import SequenceShards


def places(of: SequenceShards) -> list[int]:
    return [place for one in of.ranges for place in one]


def test_shards_are_the_sequence_in_order() -> None:
    whole = SequenceShards.whole(12)
    assert [places(whole.shard(rank, 3)) for rank in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert len(whole.shard(1, 3)) == 4


def test_early_and_late_parts_make_causal_work_equal() -> None:
    ranks = [SequenceShards.whole(16).early_and_late(rank, 4) for rank in range(4)]
    assert places(ranks[1]) == [2, 3, 12, 13]
    assert len({sum(place + 1 for place in places(rank)) for rank in ranks}) == 1  # keys that its queries see
    assert sorted(place for rank in ranks for place in places(rank)) == list(range(16))


@pytest.mark.parametrize("count", [1, 2, 4])
def test_a_shard_of_two_ranges_goes_across_them(count: int) -> None:
    both = SequenceShards.whole(16).early_and_late(0, 2)  # 0..3 and 12..15
    parts = [both.shard(index, count) for index in range(count)]
    assert [place for part in parts for place in places(part)] == [0, 1, 2, 3, 12, 13, 14, 15]
    assert {len(part) for part in parts} == {8 // count}


def test_positions_and_tokens_are_of_the_same_places() -> None:
    rows = torch.arange(32).view(2, 16)
    chosen = SequenceShards.whole(16).early_and_late(1, 2).shard(0, 2)
    assert torch.equal(chosen.of(rows)[0], chosen.positions(rows.device))
    assert chosen.of(rows).shape == (2, len(chosen))
