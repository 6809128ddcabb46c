"""Predictions and steps take turns: a machine that changes its speed meanwhile is no error of a prediction."""

from __future__ import annotations

import time

import pytest

from benchmarks.plan_accuracy import LAYERS, Accuracy, Case, Computed, Row, run, summary

CASE = Case(tokens=512, link_bytes_per_s=1e9, device_layers=3.0, host_layers=8)


def row(speeds: list[float], *, error: float = 0.0) -> Row:
    return Row(
        case=CASE,
        planned_with_s=3.0,
        plain_s=[2.0 * speed for speed in speeds],
        measured_s=[3.0 * speed * (1 + error) for speed in speeds],
        predicted_s=[3.0 * speed for speed in speeds],
        fixed_s={"swap all": [4.0 * speed for speed in speeds]},
        peak_bytes=0,
        levels="",
    )


def test_bias_and_spread_are_told_apart() -> None:
    found = Accuracy.of([1.1, 1.0, 1.3, 1.2, 1.1], [1.0] * 5)
    assert (found.bias, found.spread, found.worst) == pytest.approx((0.1, 0.05, 0.3))


def test_of_the_same_round_a_slower_machine_is_no_error_and_of_an_older_prediction_it_is() -> None:
    slowed = row([1.0, 1.0, 1.5, 1.5, 1.5])
    assert slowed.now.worst == pytest.approx(0, abs=1e-12)
    assert slowed.then.bias == pytest.approx(0.5)
    assert slowed.drift > 0.1
    assert slowed.against_best == pytest.approx(0.75)


def test_what_a_prediction_is_off_by_is_its_bias_at_any_speed() -> None:
    rows = [row([1.0, 2.0, 0.5], error=0.07), row([1.0, 1.0, 3.0], error=0.07)]
    told = summary(rows)
    assert told["now"]["bias"] == pytest.approx(0.07)
    assert told["now"]["spread"] == pytest.approx(0, abs=1e-12)


def test_a_computed_row_is_timed_by_the_processor() -> None:
    begin, processor = time.perf_counter(), time.thread_time()
    found = run(Computed(tokens=256, hidden=64, device_layers=2.6), 2)
    taken, processor = time.perf_counter() - begin, time.thread_time() - processor
    assert [len(of) for of in (found.plain_s, found.measured_s, found.predicted_s)] == [2, 2, 2]
    assert found.fixed_s == {}
    assert 0 < sum(found.plain_s + found.measured_s) < processor <= 1.1 * taken
    assert 0 < found.peak_bytes < LAYERS * found.case.layer_bytes
    assert min(found.predicted_s) > 0
