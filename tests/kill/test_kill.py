"""Runs killed at random instants leave nothing, and go on to the same bits; `make kill` has many more."""

from __future__ import annotations

import dataclasses
import random
from pathlib import Path

import pytest

from tests.kill.killing import PHASES, Find, Undisturbed, kill_line, undisturbed


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    return undisturbed(tmp_path_factory.mktemp("kill") / "undisturbed")


def test_a_run_killed_in_each_phase_goes_on_bit_for_bit(reference: Undisturbed, tmp_path: Path) -> None:
    seed = random.randrange(1 << 30)
    kills = kill_line(tmp_path / "line", phases=list(PHASES), reference=reference, seed=seed)
    assert {kill.phase for kill in kills} >= {"start", "steps"}, seed


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_runs_killed_many_times_go_on_bit_for_bit(reference: Undisturbed, tmp_path: Path, seed: int) -> None:
    phases = random.Random(seed).choices(PHASES[:3], k=7)
    assert len(kill_line(tmp_path / "line", phases=[*phases, "exit"], reference=reference, seed=seed)) >= 2


def test_another_loss_or_weight_is_a_find(reference: Undisturbed, tmp_path: Path) -> None:
    other = dataclasses.replace(reference, weights=reference.weights[:-1])
    with pytest.raises(Find, match="weights"):
        kill_line(tmp_path / "weights", phases=["steps"], reference=other, seed=1)
