"""The header's words on offloading are what runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from memo.cli.main import main
from memo.errors import ExitCode
from memo.gpt import OffloadConfig
from memo.gpt.run_config import OffloadMode

WORDS: list[tuple[dict[str, Any], str]] = [
    ({}, "offload auto"),
    ({"mode": OffloadMode.NONE}, "offload none"),
    ({"mode": OffloadMode.DISK}, "offload disk"),
    ({"mode": OffloadMode.HOST, "alpha": 0.25}, "offload host, alpha 0.25"),
    ({"alpha": 0.5}, "alpha 0.5"),
    ({"plan": Path("p.json")}, "plan p.json"),
]


@pytest.mark.parametrize(("given", "words"), WORDS)
def test_what_is_given_is_named_and_a_planner_only_where_one_runs(given: dict[str, Any], words: str) -> None:
    assert OffloadConfig(**given).words == words


def test_the_header_says_alpha_and_not_auto(capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--layers", "2", "--hidden", "32", "--heads", "2", "--seq", "32", "--steps", "1", "--on", "cpu"]
    assert main(["train", "--model", "tiny", *small, "--alpha", "0.5"]) == ExitCode.OK
    said = capsys.readouterr().out
    assert "run      steps 1 to 1, alpha 0.5\n" in said
    assert "recompute (alpha 0.5)" in said
