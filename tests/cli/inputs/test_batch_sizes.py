"""Sequences of a step, in `memo plan` and `memo train` alike."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from memo.cli.inputs.batch_sizes import batch_sizes
from memo.cli.main import main
from memo.cli.train import _config, configure
from memo.errors import ExitCode, UsageError
from memo.mip.activation import read_activation_plan


@pytest.mark.parametrize(
    ("batch", "accumulate", "whole", "found"),
    [
        (None, None, None, (1, 1)),
        (2, 3, None, (2, 3)),
        (None, None, 12, (1, 3)),
        (3, None, 24, (3, 2)),
        (None, 3, 24, (2, 3)),
        (2, 3, 24, (2, 3)),
    ],
)
def test_what_is_left_out_follows_from_the_others(
    batch: int | None, accumulate: int | None, whole: int | None, found: tuple[int, int]
) -> None:
    assert batch_sizes(batch, accumulate, whole, replicas=4) == found


@pytest.mark.parametrize(
    ("batch", "accumulate", "whole", "words"),
    [
        (2, 2, 24, "--global-batch 24 is not --batch 2 x --accumulate 2 x 4 data-parallel ranks, which is 16"),
        (5, None, 24, "--global-batch 24 is no multiple of --batch 5 x 4 data-parallel ranks, which is 20"),
        (None, 5, 24, "--global-batch 24 is no multiple of --accumulate 5 x 4 data-parallel ranks, which is 20"),
        (None, None, 3, "--global-batch 3 is no multiple of 4 data-parallel ranks, which is 4"),
    ],
)
def test_numbers_that_contradict_one_another_are_refused_in_a_line(
    batch: int | None, accumulate: int | None, whole: int | None, words: str
) -> None:
    with pytest.raises(UsageError, match=f"^{words}$"):
        batch_sizes(batch, accumulate, whole, replicas=4)


@pytest.mark.parametrize("command", ["plan", "train"])
@pytest.mark.parametrize("flag", ["--batch", "--accumulate", "--global-batch"])
def test_fewer_than_one_are_refused_in_a_line(command: str, flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, flag, "0"]) == ExitCode.USAGE
    said = capsys.readouterr().err
    assert f"{flag}: 0 is less than 1" in said
    assert said.count("\n") == 1


def test_plan_and_train_mean_the_same_microbatch(tmp_path: Path) -> None:
    step = ["--model", "125m", "--seq", "4k", "--batch", "2", "--global-batch", "24", "--tp", "2"]
    file = tmp_path / "plan.json"
    assert main(["plan", *step, "--gpu", "h100", "--gpus", "8", "-o", str(file)]) == ExitCode.OK
    planned = read_activation_plan(file).problem
    parser = argparse.ArgumentParser()
    configure(parser)
    config = _config(parser.parse_args([*step, "--dp", "4"]))
    assert config.batch // config.layout.dp == planned.profile.signature.batch == 2
    assert config.training.accumulate == planned.pipeline.microbatches == 3
