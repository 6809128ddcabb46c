"""The metrics file: its keys, and each step in it once."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from memo.errors import DataError, UsageError
from memo.gpt.train.metrics import MetricsFile, StepMetrics, StepUsage

KEYS = [
    "step",
    "loss",
    "grad_norm",
    "tokens_per_s",
    "mfu_causal",
    "mfu_full",
    "hfu",
    "peak_device_bytes",
    "peak_rss_bytes",
    "host_bytes",
    "disk_bytes",
    "d2h_bytes_per_s",
    "h2d_bytes_per_s",
    "disk_bytes_per_s",
    "stall_s",
    "recompute_s",
]


def metrics(step: int, *, loss: float = 0.1 + 0.2, mfu: float | None = None, **others: Any) -> StepMetrics:
    return StepMetrics(
        step=step,
        loss=loss,
        grad_norm=1.0,
        tokens_per_s=2048.0,
        mfu_causal=mfu,
        mfu_full=mfu,
        hfu=mfu,
        peak_device_bytes=None,
        peak_rss_bytes=1 << 30,
        host_bytes=0,
        disk_bytes=3 << 30,
        d2h_bytes_per_s=1.61e9,
        h2d_bytes_per_s=0.5e9,
        disk_bytes_per_s=1.6e9,
        stall_s=0.25,
        recompute_s=0.0,
        **others,
    )


def write(path: Path, steps: range, after: int | None = None) -> None:
    with MetricsFile(path, after_step=after) as file:
        for step in steps:
            file.write(metrics(step))


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_keys_are_those_that_others_rely_on() -> None:
    assert list(metrics(1).to_json()) == KEYS
    assert list(metrics(1, eval_loss=0.0).to_json()) == [*KEYS, "eval_loss"]
    assert list(metrics(1, alarm="a spike", skipped_steps=2).to_json()) == [*KEYS, "alarm", "skipped_steps"]


def test_a_loss_that_is_no_number_is_null_in_the_file(tmp_path: Path) -> None:
    with MetricsFile(tmp_path / "m") as file:
        file.write(metrics(1, loss=math.nan, alarm="the loss is nan", skipped_steps=1))
    line = json.loads((tmp_path / "m").read_text())
    assert (line["loss"], line["alarm"], line["skipped_steps"]) == (None, "the loss is nan", 1)


def test_a_loss_survives_the_file_to_the_last_bit(tmp_path: Path) -> None:
    write(tmp_path / "m", range(1, 2))
    assert json.loads((tmp_path / "m").read_text())["loss"] == 0.1 + 0.2


def test_a_resumed_run_has_every_step_once(tmp_path: Path) -> None:
    path = tmp_path / "m"
    write(path, range(1, 6))
    with open(path, "a") as file:
        file.write('{"step": 6, "lo')  # killed in the middle of a line
    kept = path.read_text().splitlines()[:3]
    write(path, range(4, 8), after=3)
    assert steps(path) == [1, 2, 3, 4, 5, 6, 7]
    assert path.read_text().splitlines()[:3] == kept


def test_a_run_killed_before_its_first_checkpoint_begins_the_file_again(tmp_path: Path) -> None:
    write(tmp_path / "m", range(1, 4))
    write(tmp_path / "m", range(1, 3), after=0)
    assert steps(tmp_path / "m") == [1, 2]


def test_a_torn_line_goes_even_when_no_step_does(tmp_path: Path) -> None:
    path = tmp_path / "m"
    write(path, range(1, 3))
    with open(path, "a") as file:
        file.write('{"step": 3')
    write(path, range(3, 4), after=2)
    assert steps(path) == [1, 2, 3]


def test_a_new_run_does_not_write_into_an_old_file(tmp_path: Path) -> None:
    write(tmp_path / "m", range(1, 3))
    before = (tmp_path / "m").read_bytes()
    with pytest.raises(UsageError, match="exists"):
        MetricsFile(tmp_path / "m")
    assert (tmp_path / "m").read_bytes() == before


def test_a_file_that_is_something_else_is_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("my notes\nmore\n")
    with pytest.raises(DataError, match="not a metrics file"):
        MetricsFile(tmp_path / "notes", after_step=2)
    assert (tmp_path / "notes").read_text() == "my notes\nmore\n"


@pytest.mark.parametrize("bad", [".", "missing/m"])
def test_a_path_that_cannot_be_written_is_refused_before_training(tmp_path: Path, bad: str) -> None:
    with pytest.raises(DataError, match="metrics file"):
        MetricsFile(tmp_path / bad)


def test_nothing_is_made_before_the_first_step(tmp_path: Path) -> None:
    with MetricsFile(tmp_path / "m"):
        pass
    assert not (tmp_path / "m").exists()


def test_the_line_shows_the_offload_only_where_there_is_one() -> None:
    usage = StepUsage(memory_bytes=1 << 30, memory_total_bytes=4 << 30, offloads=True)
    line = metrics(7, mfu=0.5).to_line(usage)
    assert line.startswith(
        "step 7  loss 0.30000  grad_norm 1.000  memory 1 GiB 25%  host 0 B  nvme 3 GiB  stall 250 ms"
    )
    assert line.endswith("tps 2,048  mfu_causal 50.0%")
    plain = StepUsage(memory_bytes=1 << 30, memory_total_bytes=4 << 30, offloads=False)
    assert "nvme" not in metrics(7).to_line(plain)
    small = dataclasses.replace(metrics(7), host_bytes=3 << 19)
    assert "  host 1.5 MiB  nvme 3 GiB  " in small.to_line(usage)
    assert metrics(7, skipped_steps=3).to_line(plain).endswith("skipped 3")
