"""Ranks that were started with other flags are refused before they train."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from launching import torchrun

PROGRAM = """
import os, sys
from memo.cli.main import main
own = sys.argv[1 + int(os.environ["RANK"])].split()
sys.exit(main(["train", "--on", "cpu", "--dp", "2", "--global-batch", "4", "--steps", "1", "--seq", "16", *own]))
"""


@pytest.mark.parallel
@pytest.mark.parametrize(
    ("other", "reason"),
    [
        ("--seed 1", "--seed: 0 on rank 0, but 1 on rank 1"),
        ("--accumulate 2", "--accumulate: 1 on rank 0, but 2 on rank 1"),
    ],
)
def test_ranks_with_other_flags_are_refused(other: str, reason: str, tmp_path: Path) -> None:
    program = tmp_path / "rank.py"
    program.write_text(PROGRAM)
    done = subprocess.run(
        [*torchrun(2), str(program), "--accumulate 1", f"--accumulate 1 {other}"],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 1
    assert f"{reason}; start all nodes with the same flags" in done.stderr, done.stderr
