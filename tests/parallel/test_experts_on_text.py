"""The preset with experts trains on real text, this project's documentation, to the same losses with memo and without."""

from __future__ import annotations

import functools
import json
import sys
import tempfile
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from launching import run_ranks

TEXT = sorted((Path(__file__).parents[2] / "docs").glob("*.md"))[:8]
SEQUENCES, STEPS = 8, 3
# As in test_experts_resumed.py: float32 sums in another order; a choice between two almost equal experts takes more.
BOUND = 1e-4
WITH_MEMO = {
    "host": ["--offload", "host", "--host", "256MiB"],
    "disk": ["--offload", "disk"],
    "host, half": ["--offload", "host", "--host", "256MiB", "--alpha", 0.5],
    "disk, nothing": ["--offload", "disk", "--alpha", 0],
}


@functools.cache
def trained(ranks: int, ep: int, memo: str | None = None) -> tuple[list[float], list[float | None]]:
    """Losses of the steps, and how many times the mean of rows one rank's experts got."""
    layout = ["--dp", ranks, "--ep", ep, "--batch", SEQUENCES // ranks] if ranks > 1 else ["--batch", SEQUENCES]
    with tempfile.TemporaryDirectory() as folder:
        metrics = Path(folder) / "metrics"
        flags = [
            "--model",
            "moe-tiny",
            "--seq",
            64,
            "--on",
            "cpu",
            "--warmup",
            1,
            "--steps",
            STEPS,
            "--data",
            *TEXT,
        ]
        flags += [*layout, "--metrics", metrics, *([] if memo is None else WITH_MEMO[memo])]
        done = run_ranks(ranks, "-m", "memo.cli.main", "train", *flags, timeout=280)
        assert done.returncode == 0, done.stdout + done.stderr
        steps = [json.loads(line) for line in metrics.read_text().splitlines()]
        rows = [step.get("expert_rows") for step in steps]
        if memo is not None and any(times and times > 1.25 for times in rows):
            assert "times the mean of rows; plans have room for 1.25 times" in done.stdout
        return [step["loss"] for step in steps], rows


def test_experts_train_on_text_to_the_same_losses_on_one_process_and_two_ranks() -> None:
    """The part of what follows that runs with every change."""
    alone, (divided, rows) = trained(1, 1)[0], trained(2, 2)
    assert len(set(alone)) == STEPS
    assert divided == pytest.approx(alone, rel=BOUND)
    assert all(times is not None and 1 <= times <= 2 for times in rows)
    assert trained(1, 1, "disk, nothing")[0] == alone
    assert trained(2, 2, "host, half") == (divided, rows)


@pytest.mark.parallel
@pytest.mark.parametrize("memo", WITH_MEMO)
@pytest.mark.parametrize(("ranks", "ep"), [(1, 1), (8, 2), (8, 4)])
def test_eight_ranks_train_experts_on_text_to_the_same_losses_with_memo(ranks: int, ep: int, memo: str) -> None:
    plain = trained(ranks, ep)
    assert plain[0] == pytest.approx(trained(1, 1)[0], rel=BOUND)
    assert trained(ranks, ep, memo) == plain
