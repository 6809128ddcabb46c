"""Plans made at run time in divided layouts: each stage its own, ranks of a layer one together, schedules known at once."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from launching import SCHEDULES, launch


@pytest.mark.parallel
def test_stages_keep_what_they_have_room_for_and_ranks_of_a_layer_agree() -> None:
    said = launch(2, "plans_worker.py")
    assert "kept by stage: " in said
    assert "agreed after " in said
    assert all(f"{schedule}: reloaded late" in said for schedule in SCHEDULES)
