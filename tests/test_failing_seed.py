"""Whoever meets a failure can repeat it: its seed is in the report."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SUPPORT = Path(__file__).parent / "support"
LOOP = """
def test_all_seeds():
    for seed in range(100):
        holds(seed)
def holds(seed): assert seed != 37
"""
DRAWN = """
from hypothesis import given, strategies as st
@given(numbers=st.lists(st.integers()))
def test_lists(numbers): assert len(numbers) < 2
"""


def said_of(test: str, folder: Path, plugin: str) -> str:
    file = folder / "test_seeds.py"
    file.write_text(test)
    command = [sys.executable, "-m", "pytest", "-p", plugin, "-p", "no:cacheprovider", "--rootdir", folder, file]
    done = subprocess.run(
        [str(word) for word in command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(SUPPORT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    return done.stdout


def test_a_failure_within_a_loop_over_seeds_says_of_which(tmp_path: Path) -> None:
    said = said_of(LOOP, tmp_path, "failing_seed")
    assert "holds: seed = 37" in said
    assert "test_all_seeds: seed = 37" in said


def test_a_failed_example_of_hypothesis_can_be_drawn_again(tmp_path: Path) -> None:
    pytest.importorskip("hypothesis")
    assert "@reproduce_failure(" in said_of(DRAWN, tmp_path, "hypothesis_settings")
