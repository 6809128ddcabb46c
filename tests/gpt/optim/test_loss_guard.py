"""Loss guard: detection of spikes and non-finite losses, and the policies stop, skip and warn."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from memo.errors import TrainingDiverged, UsageError
from memo.gpt.optim import LossGuardConfig, OnNan, OnSpike
from memo.gpt.optim.loss_guard import MAX_SKIPS_IN_A_ROW, LossGuard


def noisy(steps: int, *, seed: int = 0) -> list[float]:
    """Losses of an ordinary run: steep at first, then slow, with the noise of small batches."""
    noise = np.random.default_rng(seed).normal(scale=0.05, size=steps)
    return [2 + 8 * math.exp(-step / 50) + float(noise[step]) for step in range(steps)]


def after(losses: list[float], config: LossGuardConfig | None = None) -> LossGuard:
    guard = LossGuard(config or LossGuardConfig())
    for step, loss in enumerate(losses, start=1):
        guard.judge(step, loss, 1.0)
    return guard


@pytest.mark.parametrize("seed", range(4))
def test_an_ordinary_run_raises_no_alarm(seed: int) -> None:
    after(noisy(5000, seed=seed), LossGuardConfig(on_spike=OnSpike.STOP))


def test_a_jump_is_named_with_its_step_and_its_limit() -> None:
    verdict = after(noisy(500)).judge(501, 4.0, 1.0)
    assert verdict.alarm is not None
    assert "4.0000, a spike" in verdict.alarm
    assert not verdict.skip
    with pytest.raises(TrainingDiverged, match=r"^step 501: the loss is 4.0000, a spike.*step 500 are unchanged"):
        after(noisy(500), LossGuardConfig(on_spike=OnSpike.STOP)).judge(501, 4.0, 1.0)


def test_one_outlier_does_not_hide_the_next() -> None:
    """With mean and standard deviation, the first spike, a hundred times larger, would hide the second."""
    guard = after(noisy(500))
    assert guard.judge(501, 300.0, 1.0).alarm is not None
    assert guard.judge(502, 3.0, 1.0).alarm is not None


def test_the_first_steps_are_never_a_spike() -> None:
    config = LossGuardConfig(on_spike=OnSpike.STOP, warmup=32)
    guard = after([1.0] * 31, config)
    assert guard.judge(32, 1000.0, 1.0).alarm is None
    with pytest.raises(TrainingDiverged):
        guard.judge(33, 1000.0, 1.0)


def test_where_losses_are_all_alike_a_small_rise_is_no_spike() -> None:
    guard = after([2.0] * 100)
    assert guard.judge(101, 2.19, 1.0).alarm is None
    assert guard.judge(102, 2.21, 1.0).alarm is not None


@pytest.mark.parametrize(("loss", "norm", "words"), [(math.nan, 1.0, "loss is nan"), (1.0, math.inf, "norm is inf")])
def test_what_is_not_finite_stops_or_is_skipped_even_at_the_first_step(loss: float, norm: float, words: str) -> None:
    with pytest.raises(TrainingDiverged, match=words):
        LossGuard(LossGuardConfig()).judge(1, loss, norm)
    guard = LossGuard(LossGuardConfig(on_nan=OnNan.SKIP))
    verdict = guard.judge(1, loss, norm)
    assert verdict.skip
    assert verdict.alarm is not None
    assert words in verdict.alarm
    assert guard.skipped == 1


def test_a_model_with_nothing_but_bad_steps_stops_all_the_same() -> None:
    guard = LossGuard(LossGuardConfig(on_nan=OnNan.SKIP))
    for step in range(MAX_SKIPS_IN_A_ROW):
        guard.judge(step, math.nan, 1.0)
    guard.judge(20, 1.0, 1.0)  # one good step, and the count begins anew
    for step in range(MAX_SKIPS_IN_A_ROW):
        guard.judge(21 + step, math.nan, 1.0)
    with pytest.raises(TrainingDiverged, match="10 steps before it were skipped"):
        guard.judge(31, math.nan, 1.0)


def test_a_resumed_run_judges_as_the_uninterrupted_one() -> None:
    config = LossGuardConfig(on_spike=OnSpike.SKIP)
    straight = after(noisy(200), config)
    resumed = LossGuard(config)
    resumed.restore(json.loads(json.dumps(straight.state())))
    for step, loss in enumerate([2.2, 2.4, 9.0, 2.5, 2.6, 1.9], start=201):
        assert straight.judge(step, loss, 1.0) == resumed.judge(step, loss, 1.0)
    assert straight.skipped == resumed.skipped == 1


def test_a_policy_that_cannot_mean_anything_is_refused() -> None:
    with pytest.raises(UsageError, match="window"):
        LossGuardConfig(warmup=200)
    with pytest.raises(UsageError, match="deviations"):
        LossGuardConfig(deviations=0)
