"""Checkpoints made to harm: nothing in them runs, unpacks without bound, or leads out of their folder."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import BytesStorageMetadata

from memo.errors import CheckpointError
from memo.gpt.checkpoint.directory import Checkpoint, CheckpointDir, newest

SETTINGS = {"seq": 4}
LEFT_BYTES = 1 << 20


def state(fill: float = 0.0) -> dict[str, Any]:
    return {"model": {"weight": torch.full((64, 64), fill), "bias": torch.full((7,), fill, dtype=torch.bfloat16)}}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    with CheckpointDir(tmp_path / "run", keep=3) as directory:
        return directory.save(1, state(1.5), SETTINGS).path


def _resealed(path: Path) -> Checkpoint:
    """The checkpoint with its list of sizes set right, as an attacker would."""
    meta = json.loads((path / "meta.json").read_text())
    meta["files"] = {name: (path / name).stat().st_size for name in meta["files"]}
    (path / "meta.json").write_text(json.dumps(meta))
    return Checkpoint.at(path)


def _change_metadata(path: Path, change: Callable[[Any], object]) -> None:
    metadata = pickle.loads((path / ".metadata").read_bytes())
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def _refused(path: Path, words: str) -> None:
    with pytest.raises(CheckpointError, match=words) as caught:
        _resealed(path).load(state())
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 2000


class _Code:
    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.mark),)


def test_a_checkpoint_comes_back(checkpoint: Path) -> None:
    found = state()
    _resealed(checkpoint).load(found)
    assert torch.equal(found["model"]["weight"], torch.full((64, 64), 1.5))
    assert found["model"]["bias"].dtype == torch.bfloat16


def test_code_in_the_metadata_does_not_run(checkpoint: Path, tmp_path: Path) -> None:
    mark = tmp_path / "owned"
    (checkpoint / ".metadata").write_bytes(pickle.dumps(_Code(mark)))
    _refused(checkpoint, "names 'posix.mkdir'")
    assert not mark.exists()


def test_code_within_the_metadata_does_not_run(checkpoint: Path, tmp_path: Path) -> None:
    mark = tmp_path / "owned"
    _change_metadata(checkpoint, lambda metadata: setattr(metadata, "planner_data", _Code(mark)))
    _refused(checkpoint, "which no checkpoint of tensors does")
    assert not mark.exists()


def test_a_value_that_is_no_tensor_is_not_loaded(checkpoint: Path, tmp_path: Path) -> None:
    """torch would unpickle it."""
    mark, file = tmp_path / "owned", checkpoint / "__0_0.distcp"
    packed = io.BytesIO()
    torch.save(_Code(mark), packed)
    offset = file.stat().st_size
    file.write_bytes(file.read_bytes() + packed.getvalue())

    def change(metadata: Any) -> None:
        metadata.state_dict_metadata["model.weight"] = BytesStorageMetadata()
        for index, place in metadata.storage_data.items():
            if index.fqn == "model.weight":
                place.offset, place.length = offset, len(packed.getvalue())

    _change_metadata(checkpoint, change)
    _refused(checkpoint, "'model.weight', which is no tensor")
    assert not mark.exists()


def test_a_zip_bomb_is_refused_before_it_is_unpacked(checkpoint: Path) -> None:
    file = checkpoint / "__0_0.distcp"
    plain, packed = io.BytesIO(), io.BytesIO()
    torch.save(torch.zeros(1 << 24), plain)  # 64 MiB, of which the packed archive has 64 KiB
    with zipfile.ZipFile(plain) as source, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as target:
        for record in source.infolist():
            target.writestr(record.filename, source.read(record))
    assert torch.load(io.BytesIO(packed.getvalue()), weights_only=True).numel() == 1 << 24, "torch unpacks it"
    offset = file.stat().st_size
    file.write_bytes(file.read_bytes() + packed.getvalue())

    def change(metadata: Any) -> None:
        for place in metadata.storage_data.values():
            place.offset, place.length = offset, len(packed.getvalue())

    _change_metadata(checkpoint, change)
    _refused(checkpoint, "packed records")


@pytest.mark.parametrize("name", ["../other", "/etc/passwd", "a/b", ".."])
def test_the_metadata_leads_to_no_file_outside(checkpoint: Path, name: str) -> None:
    def change(metadata: Any) -> None:
        for place in metadata.storage_data.values():
            place.relative_path = name

    _change_metadata(checkpoint, change)
    _refused(checkpoint, "outside the checkpoint")


@pytest.mark.parametrize("name", ["../other", "/etc/passwd", "a/../../b", "x\0"])
def test_the_list_of_files_leads_to_no_file_outside(checkpoint: Path, name: str) -> None:
    meta = json.loads((checkpoint / "meta.json").read_text())
    meta["files"][name] = 5
    (checkpoint / "meta.json").write_text(json.dumps(meta))
    with pytest.raises(CheckpointError, match="which is outside it"):
        Checkpoint.at(checkpoint)


def test_a_cut_or_changed_metadata_is_refused_in_a_line(checkpoint: Path) -> None:
    whole = (checkpoint / ".metadata").read_bytes()
    for at in range(0, len(whole), 37):
        for content in (whole[:at], whole[:at] + bytes([whole[at] ^ 0x41]) + whole[at + 1 :]):
            (checkpoint / ".metadata").write_bytes(content)
            with contextlib.suppress(CheckpointError):  # or it loads: a byte of a name or of a number that is not read
                _resealed(checkpoint).load(state())


def test_a_cut_file_of_weights_is_refused_in_a_line(checkpoint: Path) -> None:
    whole = (checkpoint / "__0_0.distcp").read_bytes()
    for at in range(0, len(whole), 997):
        (checkpoint / "__0_0.distcp").write_bytes(whole[:at])
        _refused(checkpoint, "cannot load")


def test_a_metadata_of_2_to_the_31_places_takes_no_memory(checkpoint: Path) -> None:
    (checkpoint / ".metadata").write_bytes(b"\x80\x02]r\xff\xff\xff\x7f.")
    _refused(checkpoint, "no list of tensors")


@pytest.mark.parametrize(
    "settings",
    [
        {"model": 5},
        {"model": "abc"},
        {"model": {"rope_scaling": {"kind": "yarn"}}},
        {"model": {"rope_scaling": {"kind": "x", "factor": 2.0, "original_seq": 4}}},
        {"model": {"rope_theta": "1"}},
        {"model": {"max_seq": "long"}},
        {"seq": "x"},
        {"seq": [[]]},
        {"health": 4},
        {"health": {"losses": ["a"]}},
        {"health": {"losses": [], "skipped": "1"}},
    ],
)
def test_settings_of_another_kind_are_refused(checkpoint: Path, settings: dict[str, Any]) -> None:
    from memo.gpt.train.former_settings import require_settings

    meta = json.loads((checkpoint / "meta.json").read_text())
    (checkpoint / "meta.json").write_text(json.dumps({**meta, "settings": settings}))
    with pytest.raises(CheckpointError, match="is not a checkpoint of memo train: its setting"):
        require_settings(Checkpoint.at(checkpoint))


def test_a_link_in_the_place_of_a_checkpoint_is_not_followed_when_it_is_removed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_text("kept")
    run = tmp_path / "run"
    run.mkdir()
    for name in ("step-00000001", ".step-00000003.partial", ".step-00000004.partial"):
        (run / name).symlink_to(outside)
    with CheckpointDir(run, keep=1) as directory:
        directory.save(3, state(), SETTINGS)
        assert not (run / "step-00000003").is_symlink()
        directory.save(4, state(), SETTINGS)
    assert sorted(path.name for path in outside.iterdir()) == ["precious"]
    assert [path.name for path in run.iterdir()] == ["step-00000004"]


def test_a_directory_whose_checkpoints_are_all_damaged_says_why(checkpoint: Path) -> None:
    (checkpoint / "meta.json").unlink()
    (checkpoint / "meta.json").symlink_to("/dev/zero")
    found, skipped = newest(checkpoint.parent)
    assert found is None
    assert "not a regular file" in skipped[0]
    shutil.rmtree(checkpoint)
