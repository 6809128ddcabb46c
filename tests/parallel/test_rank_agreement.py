"""Ranks of a group hear the same answer, or the same refusal."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from launching import launch

from memo.parallel import gather_values
from memo.parallel.rank_agreement import agree


def test_each_group_hears_its_own_first_rank_and_all_ranks_see_a_difference() -> None:
    assert "agreed" in launch(4, "agreement_worker.py")


def test_without_a_process_group_a_rank_agrees_with_itself() -> None:
    assert agree("mine") == "mine"
    assert gather_values(3) == [3]
