"""Settings of a checkpoint by their flags."""

from __future__ import annotations

import argparse
import dataclasses

import pytest

from memo.cli import train
from memo.gpt.optim import LrSchedule
from memo.gpt.train.former_settings import GUARD, flag_of_setting
from memo.gpt.train_config import TrainConfig

SETTINGS = {
    "seed": "--seed",
    "pipeline_dtype": "--pipeline-dtype",
    "training.schedule.steps": "--steps",
    "training.schedule.peak": "--lr",
    "training.schedule.floor": "--min-lr",
    f"training.{GUARD}.on_nan": "--on-nan",
    f"training.{GUARD}.warmup": f"training.{GUARD}.warmup",
    "training.betas": "training.betas",
}


@pytest.mark.parametrize(("setting", "named"), SETTINGS.items())
def test_a_setting_is_named_by_its_flag_if_it_has_one(setting: str, named: str) -> None:
    assert flag_of_setting(setting) == named


def test_the_flags_of_all_numbers_of_the_step_loop_are_those_of_memo_train() -> None:
    parser = argparse.ArgumentParser()
    train.configure(parser)
    numbers = dataclasses.asdict(TrainConfig(schedule=LrSchedule.of()))
    guard, schedule = numbers.pop("loss_guard"), numbers.pop("schedule")
    settings = [f"training.{name}" for name in numbers]
    settings += [f"training.schedule.{name}" for name in schedule] + [f"training.{GUARD}.{name}" for name in guard]
    named = {flag_of_setting(setting) for setting in settings}
    assert {name for name in named if name.startswith("--")} <= parser._option_string_actions.keys()
