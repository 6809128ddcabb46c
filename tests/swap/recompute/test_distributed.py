"""Recompute under FSDP2, torch's own tensor parallel styles and every kind of pipeline schedule. Over gloo."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from slow_tests import first
from two_ranks import Launch, launched

pytestmark = pytest.mark.timeout(1000)  # the first of them waits for all

SCHEDULES = ["GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble"]
# Two neighbouring stages of a V are on one rank, and gloo in torch 2.11 has no connection of a rank to itself.
V_SCHEDULES = ["ZBVZeroBubble", "DualPipeV"] if torch.__version__ >= "2.13" else []
QUICK = ["fsdp-bf16", "megatron", "sequence", "Interleaved1F1B", *V_SCHEDULES[:1], "unequal-room"]
KINDS = ["fsdp", "fsdp-bf16", "fsdp-inner", "megatron", "tensor", "sequence", *SCHEDULES, *V_SCHEDULES, "unequal-room"]


@pytest.fixture(scope="module")
def launch(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Launch:
    """Of the kinds whose tests run."""
    asked = {
        item.callspec.params["kind"]
        for item in request.session.items
        if item.path == request.path and hasattr(item, "callspec")
    }
    kinds = [kind for kind in KINDS if kind in (asked or QUICK)]
    return launched(Path(__file__).parent / "two_ranks_worker.py", kinds, tmp_path_factory.mktemp("scratch"))


@pytest.mark.parametrize("kind", first(sorted(KINDS, key=lambda kind: kind not in QUICK), len(QUICK)))
def test_gradients_are_equal(kind: str, launch: Launch) -> None:
    assert f"equal {kind}\n" in launch.said, launch.said


def test_nothing_is_left(launch: Launch) -> None:
    assert launch.ended == 0, launch.said
    assert launch.left == []
