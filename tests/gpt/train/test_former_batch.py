"""The batch of a run that goes on: kept over a change of ranks where no flag says otherwise."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from memo.errors import UsageError
from memo.gpt import RunConfig, TrainConfig, preset
from memo.gpt.checkpoint.directory import Checkpoint
from memo.gpt.optim import LrSchedule
from memo.gpt.train.former_batch import batch_lines, batch_settings, drawn_rows, with_former_batch
from memo.parallel import Layout


def config(
    resume: Path | str | None, *, dp: int = 1, batch: int = 1, accumulate: int = 1, keeps: bool = True
) -> RunConfig:
    schedule = LrSchedule(peak=1e-3, floor=1e-4, warmup=0, steps=10)
    training = TrainConfig(schedule=schedule, accumulate=accumulate)
    return RunConfig(
        model="tiny",
        shape=preset("tiny"),
        seq=64,
        batch=batch,
        training=training,
        layout=Layout(dp=dp),
        checkpoint_dir=resume.parent if isinstance(resume, Path) else None,
        resume=resume,  # type: ignore[arg-type]
        keeps_batch=keeps,
    )


def checkpoint(folder: Path, **settings: Any) -> Path:
    path = folder / "step-00000004"
    path.mkdir()
    numbers = {
        "training": {"accumulate": settings.pop("accumulate", 1)},
        "seq": 64,
        "drawn": settings.get("batch"),
        "replicas": 1,
        **settings,
    }
    meta = {"format": "memo-checkpoint", "version": 1, "step": 4, "settings": numbers, "files": {}}
    (path / "meta.json").write_text(json.dumps(meta))
    return path


@pytest.mark.parametrize(
    ("former", "dp", "expected"),
    [
        ({"batch": 8, "accumulate": 2, "replicas": 4}, 4, (8, 2)),
        ({"batch": 8, "accumulate": 2, "replicas": 4}, 2, (4, 4)),
        ({"batch": 8, "accumulate": 2, "replicas": 4}, 1, (2, 8)),
        ({"batch": 8, "accumulate": 2, "replicas": 4}, 8, (16, 1)),
        ({"batch": 8, "accumulate": 2, "replicas": 4}, 16, (16, 1)),
        ({"batch": 6, "accumulate": 2, "replicas": 2}, 3, (6, 2)),
        ({"batch": 10, "accumulate": 1, "replicas": 2}, 5, (10, 1)),
        ({"batch": 6, "accumulate": 1, "replicas": 1}, 2, (6, 1)),
    ],
    ids=str,
)
def test_a_step_keeps_its_sequences_and_a_rank_gets_no_larger_microbatch(
    tmp_path: Path, former: dict[str, int], dp: int, expected: tuple[int, int]
) -> None:
    got = with_former_batch(config(checkpoint(tmp_path, **former), dp=dp))
    assert (got.batch, got.training.accumulate) == expected
    assert got.batch * got.training.accumulate == former["batch"] * former["accumulate"]


def test_the_newest_of_a_folder_decides_and_an_empty_or_missing_one_does_not(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, batch=6, accumulate=2, replicas=1)
    latest = dataclasses.replace(config(path), resume="latest")
    assert with_former_batch(latest).training.accumulate == 2
    for other in (tmp_path / "missing", path):
        assert with_former_batch(dataclasses.replace(latest, checkpoint_dir=other)).batch == 1


def test_flags_decide_where_they_are_given_and_settings_of_something_else_are_left_alone(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, batch=6, replicas=1)
    assert with_former_batch(config(path, batch=2, keeps=False)).batch == 2
    (tmp_path / "other").mkdir()
    for strange in ({}, {"batch": "six"}, {"batch": 6, "replicas": 0}, {"batch": True}):
        (path / "meta.json").unlink()
        path.rmdir()
        path = checkpoint(tmp_path, **strange)
        assert with_former_batch(config(path)).batch == 1


def test_at_another_length_the_flags_decide(tmp_path: Path) -> None:
    path = checkpoint(tmp_path, batch=6, accumulate=2, replicas=1, drawn=4, seq=32)
    assert with_former_batch(config(path)).batch == 1
    assert drawn_rows(config(None, batch=12), Checkpoint.at(path)) == 12


@pytest.mark.parametrize(("rows", "dp", "such"), [(12, 5, "such as 10 or 15"), (2, 3, "such as 3$")])
def test_sequences_that_do_not_divide_are_refused_with_those_that_do(
    tmp_path: Path, rows: int, dp: int, such: str
) -> None:
    with pytest.raises(UsageError, match=such):
        with_former_batch(config(checkpoint(tmp_path, batch=rows), dp=dp))


def test_rows_are_drawn_as_in_the_first_run_as_long_as_a_step_has_as_many(tmp_path: Path) -> None:
    start = Checkpoint.at(checkpoint(tmp_path, batch=6, accumulate=2, replicas=1, drawn=4))
    same, other = config(None, batch=3, accumulate=4), config(None, batch=3, accumulate=3)
    assert drawn_rows(same, start) == 4
    assert drawn_rows(other, start) == 3
    assert drawn_rows(same, None) == 3
    assert batch_settings(same, 4) == {"replicas": 1, "drawn": 4}
    assert batch_lines(config(None, batch=6, accumulate=2), start) == []
    (line,) = batch_lines(same, start)
    assert line == "batch    12 sequences a step as in the checkpoint: 4 x 3 now, 2 x 6 there"
    alike = dataclasses.replace(start, settings={**start.settings, "seed": 0, "data": None, "documents": "packed"})
    (line,) = batch_lines(same, alike)
    assert line == "batch    12 sequences a step as in the checkpoint, the same ones: 4 x 3 now, 2 x 6 there"
    (line,) = batch_lines(other, start)
    assert line.startswith(
        "warning  a step took 12 sequences in the checkpoint (2 x 6) and takes 9 now (3 x 3), other ones"
    )
