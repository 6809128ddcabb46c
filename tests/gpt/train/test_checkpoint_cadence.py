"""Checkpoint cadence: due by steps, by minutes, or by whichever comes first."""

from __future__ import annotations

from memo.gpt.train.checkpoint_cadence import CheckpointCadence


def test_every_so_many_steps_also_after_a_resume() -> None:
    cadence = CheckpointCadence(steps=10, minutes=0, done=13)
    due = []
    for step in range(14, 41):
        if cadence.due(step):
            due.append(step)
            cadence.begun(step)
    assert due == [20, 30, 40]


def test_one_that_had_to_wait_stays_due_and_is_made_once() -> None:
    cadence = CheckpointCadence(steps=10, minutes=0)
    assert [step for step in range(1, 13) if cadence.due(step)] == [10, 11, 12]
    cadence.begun(12)
    assert [step for step in range(13, 21) if cadence.due(step)] == [20]


def test_every_so_many_minutes_counts_from_the_last_one() -> None:
    now = 0.0
    cadence = CheckpointCadence(steps=0, minutes=2, clock=lambda: now)
    now = 119.0
    assert not cadence.due(1)
    now = 120.0
    assert cadence.due(2)
    cadence.begun(2)
    now = 239.0
    assert not cadence.due(3)


def test_never_is_never() -> None:
    cadence = CheckpointCadence(steps=0, minutes=0, clock=iter([0.0, 1e9]).__next__)
    assert not cadence.due(10**9)
