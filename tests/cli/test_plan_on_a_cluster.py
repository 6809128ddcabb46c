"""`memo plan --cluster` and `--stage-layers`: the best placement, its plan, and what is refused in one line."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from memo.cli.main import main
from memo.errors import ExitCode
from memo.mip.activation import check_plan, read_activation_plan
from memo.mip.simulate import verify_by_simulation

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "two_clusters.json"
PLAN = [
    "plan",
    "--model",
    "7b",
    "--seq",
    "32k",
    "--cluster",
    str(EXAMPLE),
    "--tp",
    "8",
    "--pp",
    "3",
    "--accumulate",
    "8",
    "--precision",
    "bf16",
]
GUIDE = (ROOT / "docs" / "activation-plan.md").read_text()


def test_the_guide_shows_the_example_and_what_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    assert main([*PLAN, "-o", str(path)]) == ExitCode.OK
    printed = capsys.readouterr().out
    shown = re.search(r"```text\n(best placement: .*?)```", GUIDE, re.DOTALL)
    assert shown is not None
    assert printed.startswith(shown[1])
    assert f"```json\n{EXAMPLE.read_text()}```" in GUIDE
    plan = read_activation_plan(path)
    assert check_plan(plan) is None
    verify_by_simulation(plan)
    assert plan.problem.pipeline.layers == (19, 7, 6)
    assert [machine.hardware.name for machine in plan.problem.machines] == ["h100", "a100-80g", "a100-80g"]
    assert [machine.new_node for machine in plan.problem.machines] == [False, True, False]
    assert re.search(r"\n0 +19 +h100 +", printed)
    for command in ("check", "show", "simulate"):
        assert main([command, str(path)]) == ExitCode.OK


def test_the_best_of_all_placements_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--json"]) == ExitCode.OK
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    steps = [placement["step_s"] for placement in found["placements"]]
    assert steps == sorted(steps)
    assert found["step_s"] == steps[0]
    assert [stage["layers"] for stage in found["stages"]] == found["placements"][0]["stage_layers"]
    assert {placement["crossing"] for placement in found["placements"]} == {"stages"}
    assert found["placements"][0]["stages"][0] == [{"group": "ib", "replicas": 2}]


def test_numbers_of_layers_that_are_given_are_planned(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--stage-layers", "6,6,20", "--json"]) == ExitCode.OK
    found = json.loads(capsys.readouterr().out)
    assert {tuple(placement["stage_layers"]) for placement in found["placements"]} == {(6, 6, 20)}
    uniform = ["plan", "--model", "7b", "--seq", "32k", "--gpu", "h100", "--gpus", "8", "--tp", "4", "--pp", "2"]
    uniform += ["--vocab", "200000"]
    steps = {}
    for sizes in ([], ["--stage-layers", "16,16"], ["--stage-layers", "17,15"]):
        assert main([*uniform, "--accumulate", "8", *sizes, "--json"]) == ExitCode.OK
        steps[tuple(sizes)] = json.loads(capsys.readouterr().out)["step_s"]
    even, same, shifted = steps.values()
    assert even == same
    assert shifted < even, "the head takes the time of more than two layers"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--gpu", "h100"], "--gpu does not go with --cluster"),
        (["--net", "8x400Gb"], "--net does not go with --cluster"),
        (["--gpus", "auto"], "--gpus=auto does not go with --cluster"),
        (["--gpus", "96"], "is more than the cluster's 48 (ib 16, roce 32)"),
        (["--stage-layers", "16,16"], "--stage-layers has 2 numbers, and there are 3 runs of layers"),
        (["--stage-layers", "16,8,9"], "stages of 33 layers are not 32 layers"),
        (["--stage-layers", "16,8,x"], "give a number of layers for each stage"),
        (["--stage-layers", "16,16,0"], "give a number of layers for each stage"),
        (["--device", "100GiB"], "--device: 100 GiB are more than the 80 GiB of h100"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _exit_code([*PLAN, *flags]) in (ExitCode.FAILURE, ExitCode.USAGE)
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_a_file_that_is_none_is_refused_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "cluster.json"
    text = EXAMPLE.read_text()
    for wrong, words in (
        (text.replace('"nodes": 2, "disk"', '"nodes": 2, "disks"'), "groups 0 has the unknown key 'disks'"),
        (text.replace('"1x100Gb"', '"1x-100Gb"'), "link between 'ib' and 'roce': net: '1x-100Gb'"),
        (text.replace('"oversubscription": 2.0', '"oversubscription": NaN'), "NaN is not a JSON number"),
        ("", "is empty"),
    ):
        path.write_text(wrong)
        assert main([*PLAN[:5], "--cluster", str(path)]) == ExitCode.FAILURE
        error = capsys.readouterr().err
        assert words in error
        assert error.count("\n") == 1


def test_nothing_fits_is_said_of_the_placement_that_lacks_least(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*PLAN, "--device", "2GiB", "--host", "0"]) == ExitCode.INFEASIBLE
    error = capsys.readouterr().err
    assert re.search(
        r"the device of stage \d, (h100|a100-80g), lacks .*; the smallest device budget that fits is", error
    )


def test_a_machine_is_needed(capsys: pytest.CaptureFixture[str]) -> None:
    assert _exit_code(["plan", "--model", "7b", "--seq", "8k"]) in (ExitCode.FAILURE, ExitCode.USAGE)
    assert "give the machine: --gpu, or --cluster" in capsys.readouterr().err


def test_other_machines_do_not_simulate_stages_that_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    assert main([*PLAN, "-o", str(path)]) == ExitCode.OK
    capsys.readouterr()
    assert _exit_code(["simulate", str(path), "--hardware", "h100"]) in (ExitCode.FAILURE, ExitCode.USAGE)
    assert "the plan's stages are on machines that differ" in capsys.readouterr().err


def _exit_code(arguments: list[str]) -> int:
    try:
        return main(arguments)
    except SystemExit as ended:
        return int(ended.code or 0)


def test_replicas_across_a_slow_network_exchange_rows_of_the_embedding(capsys: pytest.CaptureFixture[str]) -> None:
    steps = {}
    for way in ("auto", "dense", "sparse"):
        capsys.readouterr()
        command = [
            "plan",
            "--cluster",
            str(EXAMPLE),
            "--model",
            "llama3-8b",
            "--seq",
            "2k",
            "--mlp-tiles",
            "1",
            "--json",
        ]
        assert main([*command, "--embedding-exchange", way]) == ExitCode.OK
        report = json.loads(capsys.readouterr().out)
        steps[way] = report["step_s"]
        assert report["embedding_exchange"]["sparse"] is (way != "dense")
    assert steps["auto"] == steps["sparse"] < steps["dense"]
