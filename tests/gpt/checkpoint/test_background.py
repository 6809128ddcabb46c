"""A checkpoint is written while training goes on: it holds the state of its step, and its failure stops nobody."""

from __future__ import annotations

import errno
import os
import threading
from pathlib import Path

import pytest
import torch

from memo.errors import CheckpointError
from memo.gpt.checkpoint import directory as module
from memo.gpt.checkpoint.background import BackgroundCheckpointDir
from memo.gpt.checkpoint.directory import Checkpoint, CheckpointDir


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """The disk is slow: the background does not begin to write before this is set."""
    released, begin = threading.Event(), CheckpointDir.begin

    def late(directory: CheckpointDir, step: int) -> Path | None:
        assert released.wait(60)
        return begin(directory, step)

    monkeypatch.setattr(CheckpointDir, "begin", late)
    return released


def names(path: Path) -> list[str]:
    return sorted(entry.name for entry in path.iterdir())


def test_training_goes_on_and_the_checkpoint_is_of_its_own_step(tmp_path: Path, held: threading.Event) -> None:
    weight = torch.arange(6.0)
    torch.manual_seed(3)
    with BackgroundCheckpointDir(tmp_path, keep=2) as directory:
        directory.save(1, {"model": {"weight": weight}}, {}, wait=False)
        assert directory.busy
        assert names(tmp_path) == []
        weight += 100  # the next steps
        expected = torch.rand(4)
        held.set()
    loaded = torch.zeros(6)
    Checkpoint.at(tmp_path / "step-00000001").load({"model": {"weight": loaded}})
    assert torch.equal(loaded, torch.arange(6.0))
    assert torch.equal(torch.rand(4), expected)  # the random generator is of that step, too


def test_a_failure_is_told_once_and_leaves_the_older_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {"model": {"weight": torch.zeros(6)}}

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with BackgroundCheckpointDir(tmp_path, keep=1) as directory:
        directory.save(1, state, {}, wait=True)
        monkeypatch.setattr(module.os, "fsync", full)
        directory.save(2, state, {}, wait=False)
        while directory.busy:
            pass
        failure = directory.failure()
        assert failure is not None
        assert "ENOSPC" in str(failure)
        assert "step-00000002" in str(failure)
        assert directory.failure() is None
        assert names(tmp_path) == ["step-00000001"]
        with pytest.raises(CheckpointError, match="ENOSPC"):  # the last one of a run is not passed over
            directory.save(3, state, {}, wait=True)
        monkeypatch.undo()
        directory.save(4, state, {}, wait=True)
    assert names(tmp_path) == ["step-00000004"]


def test_the_next_one_waits_for_the_one_before(tmp_path: Path, held: threading.Event) -> None:
    state = {"model": {"weight": torch.zeros(6)}}
    with BackgroundCheckpointDir(tmp_path, keep=5) as directory:
        directory.save(1, state, {}, wait=False)
        threading.Timer(0.2, held.set).start()
        directory.save(2, state, {}, wait=True)
        assert names(tmp_path) == ["step-00000001", "step-00000002"]


def test_a_second_interrupt_does_not_wait_for_the_disk(tmp_path: Path, held: threading.Event) -> None:
    state = {"model": {"weight": torch.zeros(6)}}
    directory = BackgroundCheckpointDir(tmp_path, keep=5)
    directory.save(1, state, {}, wait=False)
    directory.__exit__(KeyboardInterrupt)
    assert directory.busy
    held.set()
    directory.close()
    assert names(tmp_path) == ["step-00000001"]
