"""Layers that torch's own parallel styles divided, with DTensors between their modules, are recomputed by tokens."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

from launching import launch, run

# "sharded" keeps DTensors between modules, "sequence" divides tokens too, "rows" has fully_shard around each layer.
# torch 2.11 itself cannot view a sequence that its ranks divide unevenly.
UNEVEN = ["sequence_sharded_uneven"] if torch.__version__ >= "2.13" else []
LAYOUTS = {
    2: ["replicated", "sequence_bf16", "sharded_bf16", *UNEVEN],
    4: ["sequence_sharded_rows_bf16", "sequence_bf16"],
}


@functools.cache
def said(ranks: int) -> str:
    """One launch, also where it fails: what it printed before that still counts."""
    return run(ranks, "styles_worker.py", *LAYOUTS[ranks])[1]


@pytest.mark.parallel
@pytest.mark.parametrize(("ranks", "name"), [(ranks, name) for ranks, names in LAYOUTS.items() for name in names])
def test_a_layer_with_sharded_tensors_is_recomputed_by_tokens_and_equal(ranks: int, name: str) -> None:
    assert f"equal {name}\n" in said(ranks), said(ranks)


def test_sharded_tensors_are_divided_by_tokens_and_their_changes_seen() -> None:
    """The part of the above that runs with every change."""
    told = launch(2, "styles_worker.py", "sequence_sharded", "changes")
    assert "equal sequence_sharded\n" in told
    assert "equal changes\n" in told
