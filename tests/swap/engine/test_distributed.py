"""Sharded models over gloo: FSDP2's gathered parameters stay, DTensors and pending collectives are unwrapped."""

from __future__ import annotations

from pathlib import Path

import pytest
from two_ranks import Launch, launched

pytestmark = pytest.mark.timeout(1000)  # the first of them waits for all

KINDS = ["fsdp", "fsdp-bf16", "tensor", "sequence"]


@pytest.fixture(scope="module")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Launch:
    return launched(
        Path(__file__).parent / "distributed_worker.py", [*KINDS, "shares"], tmp_path_factory.mktemp("scratch")
    )


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_a_sharded_model_are_equal(kind: str, launch: Launch) -> None:
    assert f"equal {kind}\n" in launch.said, launch.said


def test_ranks_of_one_node_share_its_budgets(launch: Launch) -> None:
    assert "equal shares\n" in launch.said, launch.said


def test_nothing_is_left(launch: Launch) -> None:
    assert launch.ended == 0, launch.said
    assert launch.left == []
