"""Writes torn by a power loss: whatever block of a finished checkpoint is lost, the newest whole one is taken."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from memo.errors import CheckpointError
from memo.gpt.checkpoint.directory import Checkpoint, CheckpointDir

BLOCK = 4096
SETTINGS = {"note": "x" * 2 * BLOCK}


def state(fill: float) -> dict[str, Any]:
    """Tensors of several blocks each, and enough names that the metadata has some too."""
    named = {f"layers.{number}.weight": torch.full((8,), fill) for number in range(40)}
    return {
        "model": {"embedding": torch.full((3, 2000), fill), **named},
        "optimizer": {"moment": torch.arange(5000.0) + fill},
    }


def torn(content: bytes) -> Iterator[tuple[str, bytes]]:
    """The content as each block boundary may leave it: cut there, zeroed from there on, or without the one block."""
    for begin in range(0, len(content), BLOCK):
        end = min(begin + BLOCK, len(content))
        yield f"cut at {begin}", content[:begin]
        yield f"zeroed from {begin}", content[:begin] + bytes(len(content) - begin)
        yield f"zeroed from {begin} to {end}", content[:begin] + bytes(end - begin) + content[end:]


@pytest.fixture
def run(tmp_path: Path) -> Iterator[CheckpointDir]:
    with CheckpointDir(tmp_path / "run", keep=3) as directory:
        yield directory


@pytest.mark.parametrize("name", ["meta.json", ".metadata", "__0_0.distcp"])
def test_a_torn_write_at_any_block_is_named_and_the_checkpoint_before_is_taken(run: CheckpointDir, name: str) -> None:
    run.save(1, state(1.0), SETTINGS)
    path = run.save(2, state(2.0), SETTINGS).path
    whole = (path / name).read_bytes()
    cases = list(torn(whole))
    assert len(cases) >= 9  # three blocks of each file, at least
    for what, content in cases:
        assert content != whole
        (path / name).write_bytes(content)
        found, skipped = run.latest()
        if found is not None and found.step == 2:  # no tensor lay in the block
            restored, expected = state(0.0), state(2.0)
            found.load(restored)
            for group, tensors in expected.items():
                assert all(torch.equal(restored[group][key], tensor) for key, tensor in tensors.items()), what
            assert "zeroed" in what
            continue
        assert found is not None, what
        assert found.step == 1, what
        assert len(skipped) == 1, what
        assert path.name in skipped[0], what
        assert "\n" not in skipped[0], what
    (path / name).write_bytes(whole)
    newest, skipped = run.latest()
    assert newest is not None
    assert (newest.step, skipped) == (2, [])


def test_zeroed_weights_are_never_loaded_and_written_anew_when_their_step_comes_again(run: CheckpointDir) -> None:
    path = run.save(1, state(1.0), SETTINGS).path
    content = bytearray((path / "__0_0.distcp").read_bytes())
    inside = content.index(torch.ones(2 * BLOCK // 4).numpy().tobytes())
    content[inside : inside + BLOCK] = bytes(BLOCK)
    (path / "__0_0.distcp").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"__0_0\.distcp is damaged"):
        Checkpoint.at(path).load(state(0.0))
    run.save(1, state(1.0), SETTINGS)
    restored = state(0.0)
    Checkpoint.at(path).load(restored)
    assert torch.equal(restored["model"]["embedding"], torch.ones(3, 2000))
    shutil.rmtree(path)
