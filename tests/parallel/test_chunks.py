"""Plans for schedules that give a rank two stages: made while training, and carried out from one made beforehand."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from launching import SCHEDULES, launch


@pytest.mark.parallel
def test_a_rank_of_two_stages_keeps_what_its_turns_leave_room_for() -> None:
    said = launch(2, "chunks_worker.py", timeout_s=600)
    for schedule in SCHEDULES:
        if schedule.default_chunks > 1:
            assert f"\n{schedule}: planned by turns" in said
