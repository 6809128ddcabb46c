"""Bytes that expert-parallel ranks exchange: of the bottleneck's numbers where there is one, else of the hidden size."""

from __future__ import annotations

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from equality_worker import ROWS, SEQ
from launching import launch


def test_a_bottleneck_exchanges_its_own_numbers_alone() -> None:
    told = launch(2, "expert_exchange_worker.py", "0", "8")
    layers, top_k, ways = 2, 2, 4  # there and back, forward and backward
    for hidden, bottleneck, nbytes in re.findall(r"exchanged (\d+) (\d+) (\d+)", told):
        numbers = int(bottleneck) or int(hidden)
        assert int(nbytes) == layers * ways * ROWS * SEQ * top_k * numbers * 4
    assert told.count("exchanged") == 2
