"""Recompute of layers that talk to other ranks: gradients equal bit for bit, and ranks that never part ways.

One launch runs several layouts, since starting a process costs more than what it computes here.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from launching import DIVIDES_FUSED, launch, run

LAYOUTS = {
    2: [
        "tp2_llama",
        "tp2_replicated",
        "tp2_tiles",
        "tp2_documents",
        "tp2_llama_autocast",
        "tp2_overlap_replicated",
        "tp2_overlap_llama_autocast",
        "cp2",
        "cp2_llama_documents",
        "cp2_ring",
        "cp2_shared",
        "cp2_astride_autocast",
        "cp2_autocast",
        "hf_llama",
        "hf_llama_replicated",
        "hf_llama_autocast",
        *(["hf_gpt2"] if DIVIDES_FUSED else []),
        "hf_neox",
    ],
    4: ["tp4", "dp2_tp2", "tp2_cp2", "tp2_pp2_1f1b"],
}
SETTINGS = ["whole", "quarter", "levels", "middle", "nothing"]


@functools.cache
def said(ranks: int) -> str:
    """One launch, also where it fails: what it printed before that still counts."""
    return run(ranks, "recompute_worker.py", *LAYOUTS[ranks], timeout_s=500)[1]


@pytest.mark.parallel
@pytest.mark.parametrize(("ranks", "name"), [(ranks, name) for ranks, names in LAYOUTS.items() for name in names])
def test_a_layer_that_talks_to_other_ranks_is_recomputed_by_tokens_and_equal(ranks: int, name: str) -> None:
    for setting in SETTINGS:
        assert f"equal {name} {setting}" in said(ranks), said(ranks)


def test_tensor_and_sequence_parallel_layers_are_recomputed_by_tokens_and_equal() -> None:
    """The part of the above that runs with every change."""
    told = launch(2, "recompute_worker.py", "tp2", "tp2_overlap")
    for name in ("tp2", "tp2_overlap"):
        for setting in SETTINGS:
            assert f"equal {name} {setting}" in told


MIDDLE = {
    2: [
        "tp2_llama",
        "tp2_llama_grouped_autocast",
        "tp2_replicated",
        "tp2_tiles",
        "tp2_overlap",
        "tp2_autocast",
        "cp2_llama",
        "cp2_grouped",
        "cp2_shared",
        "cp2_astride_autocast",
        "cp2_autocast",
        "cp2_ring",
    ],
    4: ["tp4", "tp2_cp2"],
}


@functools.cache
def said_of_the_middle(ranks: int) -> str:
    return run(ranks, "middle_worker.py", *MIDDLE[ranks])[1]


@pytest.mark.parallel
@pytest.mark.parametrize(("ranks", "name"), [(ranks, name) for ranks, names in MIDDLE.items() for name in names])
def test_the_middle_level_moves_what_is_derived_and_repeats_only_exchanges_around_attention(
    ranks: int, name: str
) -> None:
    assert f"middle {name}\n" in said_of_the_middle(ranks), said_of_the_middle(ranks)


def test_the_middle_level_keeps_sums_over_ranks_and_repeats_no_collective_of_tensor_parallelism() -> None:
    """The part of the above that runs with every change."""
    told = launch(2, "middle_worker.py", "tp2", "cp2")
    for name in ("tp2", "cp2"):
        assert f"middle {name}\n" in told


CASES = ["told_differently", "computed_differently", "turned_different", "less_memory", "less_memory_before_a_plan"]


def test_ranks_that_differ_do_the_same_with_layers_that_they_compute_together() -> None:
    told = launch(2, "disagreement_worker.py", *CASES, timeout_s=200)
    for case in CASES:
        assert told.count(f"equal though {case}\n") == 2
