"""Plans that a search finds are carried out by every rank as planned: collectives, messages and memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from memo.cli.main import main
from memo.errors import ExitCode

SMALL = ["--model", "125m", "--layers", "4", "--seq", "4k"]


def cluster_file(folder: Path) -> str:
    """Two GPUs of one kind in a node, and two of another kind in a node each."""
    groups = [
        {"name": "fast", "gpu": "h100", "nodes": 1, "gpus_per_node": 2},
        {"name": "slow", "gpu": "a800", "nodes": 2, "gpus_per_node": 1},
    ]
    links = [{"between": ["fast", "slow"], "net": "8x400Gb"}]
    path = folder / "cluster.json"
    path.write_text(json.dumps({"format": "memo-cluster", "version": 1, "groups": groups, "links": links}))
    return str(path)


def dry_run_of(folder: Path, capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The answer of a search, and that of a dry run of the plan that it writes."""
    path = folder / "plan.json"
    assert main(["plan", "--search", *flags, "-o", str(path), "--json"]) == ExitCode.OK
    answer: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert main(["dry-run", str(path), "--json"]) == ExitCode.OK
    return answer, json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    ("layout", "placement"),
    [
        (["--pp", "2", "--dp", "2", "--schedule", "1f1b", "--global-batch", "4"], "stages"),
        (["--pp", "1", "--dp", "3", "--global-batch", "6", "--batch", "1"], "replicas: 1 on fast, 2 on slow"),
    ],
    ids=["a pipeline across groups", "replicas across groups"],
)
def test_every_rank_of_a_plan_found_on_groups_of_nodes_does_what_it_says(
    layout: list[str], placement: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer, ran = dry_run_of(tmp_path, capsys, *SMALL, "--cluster", cluster_file(tmp_path), *layout)
    assert answer["written"]["placement"].startswith(placement)
    assert ran["ranks"] == answer["written"]["gpus"]


@pytest.mark.slow
def test_every_rank_of_a_plan_of_65b_on_64_gpus_does_what_it_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of 8 of its layers."""
    asked = [
        "--model",
        "65b",
        "--layers",
        "8",
        "--seq",
        "128k",
        "--gpu",
        "a800",
        "--nodes",
        "8",
        "--batch-tokens",
        "4m",
    ]
    answer, ran = dry_run_of(tmp_path, capsys, *asked, "--pp", "1")
    assert ran["ranks"] == answer["written"]["gpus"] == 64
