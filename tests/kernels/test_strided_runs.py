"""Views folded into rows of runs, and no import of triton before a launch."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from memo.errors import UsageError
from memo.kernels.strided_runs import Runs, runs_of

BLOCK = torch.zeros(2, 6, 4)


@pytest.mark.parametrize(
    ("view", "runs"),
    [
        (BLOCK, Runs(rows=1, run=48, stride=48)),
        (BLOCK[:, :2], Runs(rows=2, run=8, stride=24)),
        (BLOCK[:, 2:], Runs(rows=2, run=16, stride=24)),
        (BLOCK[..., :3], Runs(rows=12, run=3, stride=4)),
        (BLOCK[:, :, 0], Runs(rows=12, run=1, stride=4)),
        (BLOCK[:1, 1:2], Runs(rows=1, run=4, stride=4)),
        (BLOCK[0, 0, 0], Runs(rows=1, run=1, stride=1)),
        (BLOCK[:, :0], Runs(rows=1, run=0, stride=0)),
        (BLOCK.expand(1, 2, 6, 4), Runs(rows=1, run=48, stride=48)),
        (torch.zeros(4).expand(3, 4), Runs(rows=3, run=4, stride=0)),
    ],
)
def test_runs_of_a_view(view: torch.Tensor, runs: Runs) -> None:
    assert runs_of(view) == runs


@pytest.mark.parametrize("view", [BLOCK[0].T, BLOCK[:, :2, :2], BLOCK.permute(2, 0, 1)])
def test_a_view_that_is_none(view: torch.Tensor) -> None:
    with pytest.raises(UsageError, match="make it contiguous first"):
        runs_of(view)


def test_triton_is_not_imported_before_a_launch() -> None:
    code = (
        "import sys, torch, memo.kernels.staging, memo.kernels.masks as masks\n"
        "masks.pack_mask(torch.zeros(2, 3, dtype=torch.bool))\n"
        "assert 'triton' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, cwd="/")
