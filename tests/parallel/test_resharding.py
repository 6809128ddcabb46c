"""Ranks of another layout read of a checkpoint the bytes that `reshard` counts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from launching import launch


def test_two_ranks_read_what_the_arithmetic_says(tmp_path: Path) -> None:
    launch(
        2,
        "resharding_worker.py",
        str(tmp_path),
        "write:dp2_llama",
        "read:dp2_llama:tp2_llama",
        "read:dp2_llama:pp2_llama",
    )


@pytest.mark.parallel
def test_four_and_fewer_ranks_do_too(tmp_path: Path) -> None:
    written = ["dp4_llama", "dp2_tp2_gpt", "dp2_tp2_llama", "dp2_pp2_gpt", "dp4_llama_sparse", "tp4_gpt"]
    launch(4, "resharding_worker.py", str(tmp_path), *(f"write:{name}" for name in written))
    others = {
        4: [
            "dp4_llama:dp2_tp2_llama",
            "dp2_tp2_gpt:dp4_gpt",
            "dp2_pp2_gpt:pp2_tp2_gpt",
            "tp4_gpt:dp2_cp2_gpt",
            "dp4_llama_sparse:dp4_llama",
            "dp4_llama:dp4_llama_sparse",
        ],
        3: ["dp4_llama:dp3_llama", "tp4_gpt:dp3_gpt", "dp2_tp2_llama:dp3_llama"],
        2: ["dp2_tp2_gpt:pp2_gpt", "dp4_llama:tp2_llama"],
    }
    for ranks, pairs in others.items():
        said = launch(ranks, "resharding_worker.py", str(tmp_path), *(f"read:{pair}" for pair in pairs))
        assert said.count(" bytes\n") == len(pairs)
