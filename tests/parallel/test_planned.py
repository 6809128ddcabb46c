"""Plans of three layouts carried out by eight real ranks: the losses of one process, and the collectives of the plans."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from launching import launch

LAYOUTS = ["tp2_pp2_dp2", "cp2_tp2_dp2", "pp4_tp2"]


@pytest.mark.parallel
def test_eight_ranks_do_what_three_plans_say() -> None:
    said = launch(8, "planned_worker.py", *LAYOUTS, timeout_s=560)
    for name in LAYOUTS:
        assert f"carried out {name}: " in said
