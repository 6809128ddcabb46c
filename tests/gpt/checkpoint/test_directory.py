"""A checkpoint is whole or not there, and a run goes on from it to the same bits."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from memo.errors import CheckpointError
from memo.gpt import TrainConfig, preset
from memo.gpt.checkpoint import directory as module
from memo.gpt.checkpoint.directory import Checkpoint, CheckpointDir
from memo.gpt.model import GPT
from memo.gpt.optim import LrSchedule
from memo.gpt.train.step import Trainer

SEQ = 16


class Drawn:
    def at(self, step: int, microbatch: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.randint(50, (2, SEQ + 1), generator=torch.Generator().manual_seed(step))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def trainer(seed: int = 0, hidden: int = 32, tie: bool = True) -> Trainer:
    torch.manual_seed(seed)
    shape = preset(
        "tiny", vocab_size=50, max_seq=SEQ, layers=2, hidden=hidden, heads=2, dropout=0.2, tie_embeddings=tie
    )
    config = TrainConfig(schedule=LrSchedule(peak=1e-2, floor=1e-3, warmup=2, steps=6))
    return Trainer(GPT(shape), Drawn(), config, device=torch.device("cpu"))


def losses(subject: Trainer, first: int, last: int) -> list[float]:
    results = [subject.step(step) for step in range(first, last + 1)]
    return [result.loss for result in results if result is not None]


def save(path: Path, step: int, state: dict[str, Any], keep: int = 5) -> Checkpoint:
    with CheckpointDir(path, keep=keep) as directory:
        return directory.save(step, state, {"model": 1})


@pytest.fixture
def tiny_state() -> dict[str, Any]:
    return {"model": {"weight": torch.arange(6.0)}}


@pytest.mark.parametrize("tie", [True, False])
def test_resumed_losses_equal_uninterrupted_ones_to_the_last_bit(tmp_path: Path, tie: bool) -> None:
    straight = losses(trainer(tie=tie), 1, 6)
    first = trainer(tie=tie)
    assert losses(first, 1, 3) == straight[:3]
    saved = save(tmp_path / "run", 3, first.state())
    resumed = trainer(seed=99, tie=tie)  # other weights and another random state, all to be replaced
    Checkpoint.at(saved.path).load(resumed.state())
    assert losses(resumed, 4, 6) == straight[3:]


def test_saving_does_not_disturb_the_run(tmp_path: Path) -> None:
    straight = losses(trainer(), 1, 4)
    subject = trainer()
    first = losses(subject, 1, 2)
    save(tmp_path / "run", 2, subject.state())
    assert first + losses(subject, 3, 4) == straight


def test_the_newest_whole_checkpoint_is_taken_and_damaged_ones_are_named(
    tmp_path: Path, tiny_state: dict[str, Any]
) -> None:
    for step in (2, 10, 9):
        save(tmp_path, step, tiny_state)
    data = tmp_path / "step-00000010" / "__0_0.distcp"
    os.truncate(data, data.stat().st_size - 1)
    with CheckpointDir(tmp_path, keep=5) as directory:
        newest, skipped = directory.latest()
    assert newest is not None
    assert newest.step == 9
    assert len(skipped) == 1
    assert "step-00000010 is damaged" in skipped[0]


@pytest.mark.parametrize("missing", ["meta.json", ".metadata", "__0_0.distcp"])
def test_a_checkpoint_without_one_of_its_files_is_refused(
    tmp_path: Path, tiny_state: dict[str, Any], missing: str
) -> None:
    saved = save(tmp_path, 1, tiny_state)
    (saved.path / missing).unlink()
    with pytest.raises(CheckpointError):
        Checkpoint.at(saved.path)


def test_another_version_is_refused(tmp_path: Path, tiny_state: dict[str, Any]) -> None:
    meta = save(tmp_path, 1, tiny_state).path / "meta.json"
    meta.write_text(json.dumps(json.loads(meta.read_text()) | {"version": 2}))
    with pytest.raises(CheckpointError, match="version 2"):
        Checkpoint.at(meta.parent)


def test_another_models_checkpoint_is_refused_in_one_line(tmp_path: Path) -> None:
    saved = save(tmp_path, 1, trainer(hidden=32).state())
    with pytest.raises(CheckpointError) as caught:
        saved.load(trainer(hidden=64).state())
    assert "\n" not in str(caught.value)
    assert "weight" in str(caught.value)


@pytest.mark.parametrize("failing", ["fsync", "rename"])
def test_a_write_that_fails_leaves_the_older_checkpoint_and_nothing_else(
    tmp_path: Path, tiny_state: dict[str, Any], monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    save(tmp_path, 1, tiny_state)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with CheckpointDir(tmp_path, keep=1) as directory:
        monkeypatch.setattr(module.os, failing, full)
        with pytest.raises(CheckpointError, match="ENOSPC"):
            directory.save(2, tiny_state, {})
        monkeypatch.undo()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_a_full_disk_is_named_behind_the_writers_own_complaint(
    tmp_path: Path, tiny_state: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def complain(*_: object, **__: object) -> None:
        try:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError:
            raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 704 vs 598")  # noqa: B904

    monkeypatch.setattr(module, "dcp_save", complain)
    with CheckpointDir(tmp_path, keep=1) as directory, pytest.raises(CheckpointError, match="ENOSPC"):
        directory.save(2, tiny_state, {})


def test_a_killed_writer_leaves_a_partial_that_is_never_taken_and_soon_gone(
    tmp_path: Path, tiny_state: dict[str, Any]
) -> None:
    """A process is killed between the last byte and the rename, the worst moment there is."""
    save(tmp_path, 1, tiny_state)
    program = f"""
import os, signal, torch
from pathlib import Path
from memo.gpt.checkpoint import directory
directory.os.rename = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
with directory.CheckpointDir(Path({str(tmp_path)!r}), keep=5) as saving:
    saving.save(2, {{"model": {{"weight": torch.zeros(6)}}}}, {{}})
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -9
    assert (tmp_path / ".step-00000002.partial").is_dir()
    with CheckpointDir(tmp_path, keep=5) as directory:
        newest, skipped = directory.latest()
        assert newest is not None
        assert (newest.step, skipped) == (1, [])
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_only_the_newest_are_kept(tmp_path: Path, tiny_state: dict[str, Any]) -> None:
    with CheckpointDir(tmp_path, keep=2) as directory:
        for step in (1, 2, 3):
            directory.save(step, tiny_state, {})
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]


def test_a_damaged_checkpoint_is_made_anew_when_its_step_comes_again(
    tmp_path: Path, tiny_state: dict[str, Any]
) -> None:
    (save(tmp_path, 2, tiny_state).path / "__0_0.distcp").unlink()
    saved = save(tmp_path, 2, tiny_state)
    assert Checkpoint.at(saved.path).step == 2


def test_two_runs_cannot_share_a_directory(tmp_path: Path) -> None:
    with CheckpointDir(tmp_path, keep=1), pytest.raises(CheckpointError, match="another run"):
        CheckpointDir(tmp_path, keep=1)
    CheckpointDir(tmp_path, keep=1).close()


def test_a_directory_made_for_a_run_that_never_saved_is_removed(tmp_path: Path) -> None:
    with CheckpointDir(tmp_path / "new", keep=1):
        assert (tmp_path / "new").is_dir()
    assert not (tmp_path / "new").exists()


def test_a_file_in_place_of_the_directory_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"EEXIST|ENOTDIR"):
        CheckpointDir(tmp_path / "file", keep=1)


def test_the_random_generator_comes_back(tmp_path: Path, tiny_state: dict[str, Any]) -> None:
    torch.manual_seed(3)
    saved = save(tmp_path, 1, tiny_state)
    expected = torch.rand(4)
    torch.manual_seed(4)
    saved.load({"model": {"weight": torch.zeros(6)}})
    assert torch.equal(torch.rand(4), expected)


def test_a_damaged_newer_checkpoint_does_not_count_as_kept(tmp_path: Path, tiny_state: dict[str, Any]) -> None:
    for step in (10, 12):
        save(tmp_path, step, tiny_state)
    os.truncate(tmp_path / "step-00000012" / "__0_0.distcp", 5)
    save(tmp_path, 11, tiny_state, keep=1)
    assert Checkpoint.at(tmp_path / "step-00000011").step == 11
