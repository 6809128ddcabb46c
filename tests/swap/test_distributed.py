"""Sharded models over gloo: FSDP2's gathered parameters stay, DTensors and pending collectives are unwrapped."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

WORKER = Path(__file__).parent / "distributed_worker.py"


@pytest.mark.parametrize("kind", ["fsdp", "fsdp-bf16", "tensor", "sequence"])
def test_gradients_of_a_sharded_model_are_equal(kind: str, tmp_path: Path) -> None:
    launch(kind, tmp_path)


def test_ranks_of_one_node_share_its_budgets(tmp_path: Path) -> None:
    launch("shares", tmp_path)


def launch(kind: str, tmp_path: Path) -> None:
    """Two ranks of the worker; each compares for itself and fails if anything differs."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(WORKER), kind, str(tmp_path)], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert list(tmp_path.iterdir()) == []
