"""The embedding's gradient exchanged as rows: the dense exchange's losses and weights, in the bytes of the arithmetic."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from launching import launch


def test_two_ranks_have_the_dense_exchanges_bits_in_the_arithmetics_bytes() -> None:
    said = launch(2, "embedding_worker.py", "dp2", "cp2")
    assert "dp2: equal bit for bit" in said
    assert "cp2: equal bit for bit" in said
    assert said.count("dp2: 76056 bytes") == 1, "three steps of (2 - 1) (8 + 192 (4 + 32 x 4))"


@pytest.mark.parallel
def test_four_ranks_are_within_the_bound_of_another_order_and_pairs_of_ranks_have_the_bits() -> None:
    said = launch(4, "embedding_worker.py", "dp4", "dp2_cp2", "dp2_tp2", "dp2_pp2")
    assert said.count("equal within the bound") == 2
    assert said.count("equal bit for bit") == 2
    assert said.count("114120 bytes") == 2, "three steps of (4 - 1) (8 + 96 (4 + 32 x 4))"


@pytest.mark.parallel
def test_three_ranks_are_within_the_bound() -> None:
    assert "dp3: equal within the bound" in launch(3, "embedding_worker.py", "dp3")
