"""The hunt on two ranks: programs are equal there with and without memo, and what differs on one rank is found."""

from __future__ import annotations

import dataclasses

import pytest

from tests.hunt.drawing import drawn, with_only
from tests.hunt.levels import LEVELS
from tests.hunt.program import Program
from tests.hunt.ranks import LEVELS_ON_RANKS, PLACEMENTS, compare_on_ranks, drawn_placement


def _with_memo_seen_by(rank: int) -> Program:
    """A layer whose result differs by a bit on one rank where memo is there."""
    program = with_only("experts in place")
    watched = "def watched():\n    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)\n"
    watched += f"    return 1.0 if hooks is None or torch.distributed.get_rank() != {rank} else 1.0000002\n"
    (body,) = program.kinds
    line = dataclasses.replace(body.lines[0], name="watched", text=f"{watched}x = x * watched()", plain="", declared=())
    body = dataclasses.replace(body, lines=(body.lines[0], line, *body.lines[1:]))
    return dataclasses.replace(program, kinds=(body,))


def test_levels_on_ranks_are_levels() -> None:
    assert set(LEVELS_ON_RANKS) <= LEVELS.keys(), "a rank that dies before its first comparison discards the program"


def test_what_differs_on_one_rank_is_found_there_and_its_gradients_on_both() -> None:
    found = compare_on_ranks(_with_memo_seen_by(1), "replicated", "1").finds
    assert [(find.level, find.kind) for find in found] == [
        ("1, replicated, rank 0", "differs in gradient"),
        ("1, replicated, rank 1", "differs in loss"),
    ]


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_program_is_equal_on_two_ranks_bit_for_bit(placement: str) -> None:
    outcome = compare_on_ranks(with_only("experts in place"), placement, "0")
    assert (outcome.discarded, outcome.finds, outcome.compared) == (None, [], {"0": True})
    assert outcome.moved_bytes["0"] > 0


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_random_programs_are_equal_on_two_ranks_bit_for_bit() -> None:
    outcomes = {seed: compare_on_ranks(drawn(seed), *drawn_placement(seed)) for seed in range(2000, 2040)}
    assert not {seed: outcome.finds for seed, outcome in outcomes.items() if outcome.finds}
    assert sum(outcome.discarded is None for outcome in outcomes.values()) > 10
