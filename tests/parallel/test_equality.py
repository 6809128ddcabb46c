"""Every layout trains as one process does: losses, norms and gradients of three steps, and memo changes no bit of them.

One launch runs several layouts, since starting a process costs more than what it computes here.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from launching import SPLITS_BACKWARD, launch, run

ALPHAS = "1,0.5"
LAYOUTS = {
    2: [
        "dp2",
        "tp2",
        "tp2_llama",
        "tp2_replicated",
        "cp2",
        "cp2_llama",
        "cp2_ring",
        "cp2_grouped_ring",
        "pp2_gpipe",
        "pp2_1f1b",
        "pp2_interleaved-1f1b",
        "pp2_interleaved-zero-bubble",
        "pp2_zbv",
        "pp2_zbv_llama",
        "tp2_llama_tiles_float64",
        "tp2_documents_float64",
        "cp2_llama_documents_float64",
        "pp2_interleaved-1f1b_documents_float64",
        "dp2_moe_float64",
        "dp2_ep2_moe_float64",
        "dp2_ep2_dcca_float64",
        "tp2_moe_float64",
        "tp2_replicated_moe_float64",
        "pp2_moe_float64",
        "pp2_zbv_dcca_float64",
        "cp2_llama_moe_float64",
        "tp2_local_float64",
        "cp2_llama_local_float64",
        "cp2_documents_local_float64",
        "pp2_1f1b_local_float64",
        "pp2_zbv_local_moe_float64",
        "tp2_overlap_float64",
        "tp2_overlap_replicated_documents_llama_float64",
        "tp2_overlap_tiles_float64",
    ],
    4: [
        "dp4",
        "tp4",
        "dp2_tp2",
        "cp2_tp2",
        "cp4_llama_ring",
        "tp2_pp2_interleaved-zero-bubble",
        "tp2_pp2_zbv_tiles_float64",
        "dp2_pp2_zbv",
        "pp4",
        "dp4_moe_float64",
        "dp4_ep2_moe_float64",
        "dp4_ep4_moe_float64",
        "dp4_ep2_llama_dcca_float64",
        "dp2_tp2_ep2_moe_float64",
        "cp2_tp2_llama_moe_float64",
        "pp2_dp2_ep2_moe_float64",
        "pp2_tp2_interleaved-zero-bubble_moe_float64",
        "dp2_ep2_cp2_llama_moe_float64",
        "cp2_tp2_local_float64",
        "dp2_tp2_overlap_llama_float64",
        "cp2_tp2_overlap_documents_float64",
        "tp2_pp2_zbv_overlap_float64",
    ],
    8: [
        "dp4_tp2_overlap_float64",  # one sequence on a rank
        "dp2_tp2_pp2",
        "dp2_cp2_tp2",
        "cp2_tp4",
        "dp2_tp2_pp2_ep2_moe_float64",
        "dp4_tp2_moe_float64",
        "dp4_tp2_ep2_moe_float64",
    ],
}


AT_ONCE = 8


def splits(name: str) -> bool:
    """Whether the layout's schedule splits a backward in two."""
    return "zero-bubble" in name or "zbv" in name


RUN = {ranks: [name for name in names if SPLITS_BACKWARD or not splits(name)] for ranks, names in LAYOUTS.items()}


@functools.cache
def said(ranks: int, first: int) -> str:
    """One launch, also where it fails: what it printed before that still counts."""
    return run(ranks, "equality_worker.py", ALPHAS, *RUN[ranks][first : first + AT_ONCE])[1]


@pytest.mark.parallel
@pytest.mark.parametrize(("ranks", "name"), [(ranks, name) for ranks, names in LAYOUTS.items() for name in names])
def test_a_layout_is_equal_to_one_process_and_to_itself_with_memo(ranks: int, name: str) -> None:
    if name not in RUN[ranks]:
        pytest.skip("zero-bubble schedules need torch 2.13")
    told = said(ranks, RUN[ranks].index(name) // AT_ONCE * AT_ONCE)
    assert f"equal {name} within" in told, told


SHARED = {
    2: ["cp2_astride_float64"],
    4: ["cp4_grouped_llama_float64", "cp4_shared_documents_float64", "cp2_tp2_grouped_llama_float64", "cp4_grouped"],
    8: ["dp2_cp2_tp2_grouped_float64", "dp2_cp4_shared_llama_float64", "cp4_pp2_grouped_float64"],
}
"""Context-parallel ranks of which several attend with the same key/value head."""


@pytest.mark.parametrize(
    "ranks", [ranks if ranks == 2 else pytest.param(ranks, marks=pytest.mark.parallel) for ranks in SHARED]
)
def test_the_gradient_of_a_key_value_head_is_the_sum_of_those_of_all_ranks_that_use_it(ranks: int) -> None:
    told = launch(ranks, "equality_worker.py", "1,0.5,0", *SHARED[ranks])
    for name in SHARED[ranks]:
        assert f"equal {name} within" in told, told


EVERY_CHANGE = {
    2: ["dp2", "tp2_llama", "cp2_ring", "cp2_local_float64", "pp2_1f1b", "pp2_zbv", "dp2_ep2_moe_float64"],
    4: ["dp2_tp2", "pp2_dp2_ep2_moe_float64"],
}
"""The part of the above that runs with every change: each way to divide a training, and some together."""


@pytest.mark.parametrize("ranks", EVERY_CHANGE)
def test_each_way_to_divide_is_equal_to_one_process_and_to_itself_with_memo(ranks: int) -> None:
    names = [name for name in EVERY_CHANGE[ranks] if SPLITS_BACKWARD or not splits(name)]
    told = launch(ranks, "equality_worker.py", "0.5", *names)
    for name in names:
        assert f"equal {name} within" in told, told
