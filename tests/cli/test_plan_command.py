"""`memo plan`: plans, exit codes, files; and what `check`, `show` and `simulate` make of the plan."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from activation_problems import random_problem, with_curves

from memo.cli.main import main
from memo.cli.tables.activation import activation_table
from memo.errors import ExitCode
from memo.gpt import GPU_PRECISION, preset
from memo.gpt.arithmetic import parameter_count
from memo.mip.activation import check_plan, plan_to_json, profile_to_json, read_activation_plan, solve_problem
from memo.mip.activation.files import hardware_to_json
from memo.mip.inputs import PRESETS, Network

PAPER = ["plan", "--model", "7b", "--seq", "1m", "--gpu", "a800", "--gpus", "8", "--tp", "8", "--host", "2TiB"]
PAPER += ["--device", "80GiB"]


@pytest.fixture
def plan_path(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    assert main([*PAPER, "-o", str(path)]) == ExitCode.OK
    return path


def of_json(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> dict[str, Any]:
    capsys.readouterr()
    assert main([*arguments, "--json"]) == ExitCode.OK
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def assert_one_line(capsys: pytest.CaptureFixture[str]) -> str:
    error = capsys.readouterr().err
    assert error.endswith("\n")
    assert error.count("\n") == 1
    return error


def test_the_papers_headline_run_is_planned_checked_shown_and_simulated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan_path = tmp_path / "plan.json"
    assert main([*PAPER, "-o", str(plan_path)]) == ExitCode.OK
    written = capsys.readouterr().out
    assert written.splitlines()[-1] == f"Wrote {plan_path}"
    # Left free for rounding to whole storages: on each of eight ranks one of 4 GiB, and less than a layer.
    assert re.search(r"host, a node +2 TiB +1\.9\d+ TiB +\d\.\d %", written)
    assert check_plan(read_activation_plan(plan_path)) is None
    assert main(["check", str(plan_path)]) == ExitCode.OK
    assert "valid, 32 layers" in capsys.readouterr().out
    assert main(["show", str(plan_path)]) == ExitCode.OK
    shown = capsys.readouterr().out
    assert shown.splitlines() == written.splitlines()[: len(shown.splitlines())]
    assert main(["simulate", str(plan_path)]) == ExitCode.OK
    assert "they agree" in capsys.readouterr().out


def test_figures_have_their_names_and_units(capsys: pytest.CaptureFixture[str]) -> None:
    report = of_json(capsys, PAPER)
    assert report["mfu_causal"] < report["hfu"] < report["mfu_full"] < 1.0
    assert report["tokens_per_s"] == pytest.approx((1 << 20) / report["step_s"])
    # 6N + 6Lhs FLOPs a token over eight GPUs of 312 TFLOP/s; N without embedding, 6.44 + 0.21 billion.
    flops = 6 * (32 * 12 * 4096**2 + 50257 * 4096) + 6 * 32 * 4096 * (1 << 20)
    assert report["mfu_causal"] == pytest.approx(flops * report["tokens_per_s"] / (8 * 312e12))
    assert report["step_s"] == pytest.approx(report["simulated_step_s"], rel=1e-6)
    assert report["status"] == "optimal"


def test_one_line_names_the_layers_with_full_device_memory_and_what_a_gib_more_saves(
    capsys: pytest.CaptureFixture[str],
) -> None:
    # With room on the host, so that nothing else is short.
    short = ["plan", "--model", "7b", "--seq", "32k", "--gpu", "a800", "--gpus", "8", "--tp", "8", "--host", "2TiB"]
    short += ["--precision", "bf16"]
    # Three GiB apart: plans move whole storages, and so save up to a third more or less by a single one.
    tight, roomy = (of_json(capsys, [*short, "--device", size]) for size in ("10GiB", "13GiB"))
    (reason,) = tight["binding"]
    places = r"at layers? [\d, .]+(?: and at the head)?"
    found = re.fullmatch(rf"device memory {places} is full: a GiB more saves (\d+) ms a step", reason)
    assert found
    assert float(found[1]) / 1e3 == pytest.approx((tight["step_s"] - roomy["step_s"]) / 3, rel=0.1)


def test_what_the_default_budget_leaves_out_is_named_and_what_a_flag_leaves_out_is_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = ["plan", "--model", "tiny", "--seq", "8k", "--gpu", "h100"]
    assert main(asked) == ExitCode.OK
    assert re.search(r"^outside the budget: CUDA, the allocator's gaps +4,096\.00$", capsys.readouterr().out, re.M)
    assert main([*asked, "--device", "20GiB"]) == ExitCode.OK
    assert re.search(r"^outside the budget +61,440\.00$", capsys.readouterr().out, re.M)


def test_the_same_request_gives_the_same_bytes(plan_path: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.json"
    assert main([*PAPER, "-o", str(again)]) == ExitCode.OK
    assert again.read_bytes() == plan_path.read_bytes()


def test_what_fits_is_declined_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    short = ["plan", "--model", "7b", "--seq", "8k", "--gpu", "a800", "--gpus", "8", "--tp", "8"]
    report = of_json(capsys, short)
    assert report["status"] == "declined"
    assert main(short) == ExitCode.OK
    assert "nothing to move: fits in" in capsys.readouterr().out


def test_infeasible_says_what_would_fit_and_that_fits(capsys: pytest.CaptureFixture[str]) -> None:
    small = [*(word if word != "80GiB" else "40GiB" for word in PAPER), "--precision", "bf16"]
    assert main(small) == ExitCode.INFEASIBLE
    shown = capsys.readouterr()
    assert re.search(r"^above the budget +\d", shown.out, re.MULTILINE)
    (words,) = shown.err.splitlines()
    assert words.startswith("memo plan: no plan fits: 7b in bf16 at 1m tokens: ")
    assert not re.search(r"\d{6}", words)  # no counts of bytes
    named = (
        words.partition("it fits with ")[2]
        .partition(";")[0]
        .replace(" (memo train has it for one GPU)", "")
        .split(" or ")
    )
    for flags in named:
        assert main([*small, *flags.split()]) == ExitCode.OK
    least = words.split("the smallest device budget that fits is ")[1].replace(" ", "")
    assert main([word if word != "40GiB" else least for word in small]) == ExitCode.OK


@pytest.mark.parametrize(
    ("asked", "named"),
    [
        (["--model", "7b", "--seq", "32k", "--precision", "fp32"], ["--gpus 2", "--optimizer-offload"]),
        (["--model", "65b", "--seq", "32k", "--precision", "bf16"], ["--gpus 8"]),
    ],
)
def test_each_change_that_is_named_fits_and_a_kind_that_takes_no_fewer_gpus_is_left_out(
    asked: list[str], named: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["plan", *asked, "--gpu", "h100"]
    assert main([*asked, "--json"]) == ExitCode.INFEASIBLE
    shown = capsys.readouterr()
    assert json.loads(shown.out)["fits"] == named
    assert "before any activation, and a GPU's budget is 76 GiB; it fits with " + " or ".join(named) in shown.err
    for flags in named:
        assert main([*asked, *flags.split()]) == ExitCode.OK
        capsys.readouterr()


def test_an_optimizer_on_the_host_takes_room_there(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "--model", "13b", "--seq", "64k", "--gpu", "h100", "--gpus", "1", "--optimizer-offload"]
    asked += ["--precision", "bf16"]
    parameters = parameter_count(preset("13b"))
    state = 8 * parameters  # of bf16: two moments, gradients, and a copy of the parameters
    plenty = of_json(capsys, [*asked, "--host", "1TiB"])
    assert plenty["budgets"]["host_bytes"] == pytest.approx((1 << 40) - state, rel=0.001)
    assert plenty["memory"]["uses_bytes"]["optimizer"] == 0
    assert main([*asked, "--host", "40GiB"]) == ExitCode.USAGE
    assert "of optimizer state and gradients into a node's host memory, and its budget is 40 GiB" in assert_one_line(
        capsys
    )


def test_disks_and_their_wear(capsys: pytest.CaptureFixture[str]) -> None:
    less_host = [word if word != "2TiB" else "512GiB" for word in PAPER] + ["--disk-budget", "8TiB"]
    free = of_json(capsys, less_host)
    assert free["stages"][0]["disk_written_bytes"] > 0
    assert main(less_host) == ExitCode.OK
    said = re.search(r"([\d.]+) TB a day at this rate: ([\d.]+) days for each 600 TBW", capsys.readouterr().out)
    assert said is not None
    a_day = 8 * free["stages"][0]["disk_written_bytes"] / free["step_s"] * 86400
    assert float(said[1]) == pytest.approx(a_day / 1e12, rel=0.01)
    assert float(said[1]) * float(said[2]) == pytest.approx(600, rel=0.02)
    bounded = of_json(capsys, [*less_host, "--wear", str(a_day / 2e12)])
    written = 8 * bounded["stages"][0]["disk_written_bytes"] / bounded["step_s"] * 86400
    assert 0.4 * a_day < written <= a_day / 2 * (1 + 1e-9)


def test_pipelines_share_a_node(capsys: pytest.CaptureFixture[str]) -> None:
    model = ["plan", "--model", "7b", "--seq", "64k", "--gpu", "a800", "--gpus", "8", "--tp", "2", "--pp", "4"]
    report = of_json(capsys, [*model, "--accumulate", "8", "--device", "48GiB", "--host", "1TiB"])
    host = [stage["peak_host_bytes"] for stage in report["stages"]]
    assert len(host) == 4
    assert host[0] > host[3]
    assert 2 * sum(host) <= 1 << 40


def test_a_profile_and_a_machine_from_files_give_the_presets_plan(
    plan_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile, machine = tmp_path / "profile.json", tmp_path / "machine.json"
    profile.write_text(profile_to_json(read_activation_plan(plan_path).problem.profile))
    machine.write_text(hardware_to_json(PRESETS["a800"]))
    again = tmp_path / "again.json"
    arguments = ["plan", "--profile", str(profile), "--gpu", str(machine), "--gpus", "8", "--host", "2TiB"]
    assert main([*arguments, "--device", "80GiB", "-o", str(again)]) == ExitCode.OK
    assert read_activation_plan(again) == dataclasses.replace(read_activation_plan(plan_path), run=None)


DOCTOR = {
    "gpus": [
        {
            "memory_total_bytes": 85 << 30,
            "link": {
                "d2h_bytes_per_s": 1e9 * (2 + gpu),
                "h2d_bytes_per_s": 3e9,
                "d2h_together_bytes_per_s": 1.5e9,
                "h2d_together_bytes_per_s": 1.5e9,
            },
        }
        for gpu in range(8)
    ],
    "host": {"memory_available_bytes": 1 << 41},
    "disks": [{"rates": {"write_bytes_per_s": 7e9, "read_bytes_per_s": 8e9}}, {"rates": None}],
    "striped": None,
}


def test_a_doctors_report_replaces_the_presets_rates(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report, plan = tmp_path / "doctor.json", tmp_path / "plan.json"
    report.write_text(json.dumps(DOCTOR))
    assert main([*PAPER, "--doctor", str(report), "-o", str(plan)]) == ExitCode.OK
    machine = read_activation_plan(plan).problem.hardware
    assert (machine.d2h_bytes_per_s, machine.h2d_bytes_per_s, machine.duplex_bytes_per_s) == (2e9, 3e9, 3e9)
    assert (machine.device_bytes, machine.host_bytes) == (85 << 30, 1 << 41)
    assert (machine.disk_write_bytes_per_s, machine.disk_read_bytes_per_s) == (7e9, 8e9)
    assert machine.peak_flops == PRESETS["a800"].peak_flops
    report.write_text(json.dumps(DOCTOR | {"sustained": {"steady_bytes_per_s": 2e9}}))
    assert main([*PAPER, "--doctor", str(report), "-f", "-o", str(plan)]) == ExitCode.OK
    assert read_activation_plan(plan).problem.hardware.disk_write_bytes_per_s == 2e9


def test_the_network_is_that_of_the_option(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.json"
    assert main([*PAPER, "--net", "4x400Gb", "-o", str(plan)]) == ExitCode.OK
    network = read_activation_plan(plan).problem.hardware.network
    assert (network.nics_per_node, network.nic_bytes_per_s) == (4, 50e9)
    assert network.node_efficiency == PRESETS["a800"].network.node_efficiency
    assert main([*PAPER, "--net", "none", "-f", "-o", str(plan)]) == ExitCode.OK
    assert read_activation_plan(plan).problem.hardware.network.nics_per_node == 0
    assert main(["simulate", str(plan), "--net", "8x50GB"]) == ExitCode.OK
    capsys.readouterr()
    for command in ([*PAPER, "--net", "fast"], ["simulate", str(plan), "--net", "fast"]):
        assert main(command) == ExitCode.USAGE
        assert "--net 'fast'" in assert_one_line(capsys)


def test_a_machines_file_has_a_network(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine, plan = tmp_path / "machine.json", tmp_path / "plan.json"
    description = json.loads(hardware_to_json(PRESETS["a800"]))
    description["network"] = {"nics_per_node": 2, "nic_bytes_per_s": 1e9, "oversubscription": 3}
    machine.write_text(json.dumps(description))
    arguments = [str(machine) if word == "a800" else word for word in PAPER]
    assert main([*arguments, "-o", str(plan)]) == ExitCode.OK
    network = read_activation_plan(plan).problem.hardware.network
    assert network == Network(nics_per_node=2, nic_bytes_per_s=1e9, oversubscription=3.0)
    capsys.readouterr()
    description["network"]["nics_per_node"] = 0
    machine.write_text(json.dumps(description))
    assert main(arguments) == ExitCode.FAILURE
    assert "0 NICs of 1e+09 bytes/s" in assert_one_line(capsys)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{}", "no list of gpus"),
        ('{"gpus": [{"link": {"d2h_bytes_per_s": "fast"}}], "disks": []}', "is not a rate"),
        ('{"gpus": [], "disks": [{"rates": {"write_bytes_per_s": -1}}]}', "is not a rate"),
        ("[", "not JSON"),
    ],
)
def test_a_report_that_is_none_is_one_line(
    text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = tmp_path / "doctor.json"
    report.write_text(text)
    assert main([*PAPER, "--doctor", str(report)]) == ExitCode.FAILURE
    assert words in assert_one_line(capsys)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--gpu", "a800"], ExitCode.USAGE, "either --model"),
        (["--gpu", "a800", "--model", "7b"], ExitCode.USAGE, "--seq"),
        (["--gpu", "a900", "--model", "7b", "--seq", "8k"], ExitCode.USAGE, "unknown GPU"),
        (["--gpu", "a800", "--model", "8b", "--seq", "8k"], ExitCode.USAGE, "unknown model"),
        (["--gpu", "a800", "--model", "lama3-8b", "--seq", "8k"], ExitCode.USAGE, "did you mean llama3-8b?"),
        (["--gpu", "a800", "--model", "7b", "--seq", "8k", "--tp", "2"], ExitCode.USAGE, "not a multiple"),
        (["--gpu", "a800", "--model", "7b", "--seq", "8k", "--gpus", "0"], ExitCode.USAGE, "--gpus: 0 is less than 1"),
        (["--gpu", "a800", "--model", "7b", "--seq", "8k", "--host", "8 gigs"], ExitCode.USAGE, "cannot read"),
        (["--gpu", "a800", "--model", "7b", "--seq", "8k", "--accumulate", "0"], ExitCode.USAGE, "0 is less than 1"),
        (["--gpu", "a800", "--model", "7b", "--seq", "8k", "--wear", "-1"], ExitCode.USAGE, "--wear"),
        (["--gpu", "missing.json", "--model", "7b", "--seq", "8k"], ExitCode.FAILURE, "cannot read"),
        (["--gpu", "a800", "--profile", "missing.json"], ExitCode.FAILURE, "cannot read"),
    ],
)
def test_exit_codes(
    arguments: list[str],
    code: ExitCode,
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["plan", *arguments]) == code
    assert words in assert_one_line(capsys)


def test_existing_files_are_kept_without_force(plan_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    before = plan_path.read_bytes()
    assert main([*PAPER, "-o", str(plan_path)]) == ExitCode.FAILURE
    assert "exists" in assert_one_line(capsys)
    assert plan_path.read_bytes() == before
    assert main([*PAPER, "-o", str(plan_path), "-f"]) == ExitCode.OK


def test_a_plan_that_was_edited_is_invalid_and_shown_as_such(
    plan_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = json.loads(plan_path.read_text())
    root["layers"][5] |= {"kept": 1.0, "host": 0.0}
    plan_path.write_text(json.dumps(root))
    capsys.readouterr()
    assert main(["check", str(plan_path)]) == ExitCode.PLAN_INVALID
    assert "rule device" in assert_one_line(capsys)
    assert main(["check", str(plan_path), "--json"]) == ExitCode.PLAN_INVALID
    assert json.loads(capsys.readouterr().out)["rule"] == "device"
    assert main(["show", str(plan_path)]) == ExitCode.OK
    assert "INVALID: rule device" in capsys.readouterr().out


def test_names_from_files_reach_the_terminal_escaped(plan_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = json.loads(plan_path.read_text())
    root["problem"]["profile"]["signature"]["model"] = "\x1b[31mred"
    root["problem"]["hardware"]["name"] = "\x1b]0;title\x07"
    plan_path.write_text(json.dumps(root))
    capsys.readouterr()
    assert main(["show", str(plan_path)]) == ExitCode.OK
    assert "\x1b" not in capsys.readouterr().out


def test_a_plan_is_of_the_schedule_that_is_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "--model", "7b", "--seq", "48k", "--gpu", "h100", "--gpus", "8", "--tp", "2", "--pp", "4"]
    asked += ["--accumulate", "8", "--device", "76GiB", "--host", "1TiB", "--precision", "bf16"]
    steps, traces = set(), tmp_path / "traces"
    for schedule in ("1f1b", "interleaved-1f1b", "interleaved-zero-bubble", "zbv"):
        path = tmp_path / f"{schedule}.json"
        report = of_json(capsys, [*asked, "--schedule", schedule, "-o", str(path)])
        assert max(stage["peak_device_bytes"] for stage in report["stages"]) <= 76 << 30
        steps.add(report["step_s"])
        plan = read_activation_plan(path)
        assert str(plan.problem.pipeline.schedule) == schedule
        assert check_plan(plan) is None
        assert main(["show", str(path)]) == ExitCode.OK
        assert (f"pp 4, microbatches 8 ({schedule})" in capsys.readouterr().out) is (schedule != "1f1b")
    traces.mkdir()
    assert main(["simulate", str(path), "-o", str(traces)]) == ExitCode.OK
    assert len(list(traces.iterdir())) == 4
    assert len(steps) == 4


@pytest.mark.parametrize("schedule", ["interleaved-1f1b", "interleaved-zero-bubble"])
def test_a_plan_has_as_many_chunks_as_are_asked_for(
    schedule: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["plan", "--model", "7b", "--seq", "64k", "--gpu", "h100", "--gpus", "8", "--tp", "2", "--pp", "4"]
    asked += ["--accumulate", "8", "--schedule", schedule, "--precision", "bf16"]
    waits = []
    for chunks in (2, 4):
        path = tmp_path / f"{chunks}.json"
        report = of_json(capsys, [*asked, "--chunks", str(chunks), "-o", str(path)])
        plan = read_activation_plan(path)
        assert plan.problem.pipeline.chunks == chunks
        waits.append(report["step_s"] / max(stage.microbatch_s for stage in plan.stages))
        assert main(["show", str(path)]) == ExitCode.OK
        assert (f"({schedule} of 4 chunks)" in capsys.readouterr().out) is (chunks == 4)
        assert main(["simulate", str(path)]) == ExitCode.OK
        capsys.readouterr()
    assert waits[1] < waits[0], "more chunks make the bubble shorter"


@pytest.mark.parametrize(("gpus", "tp", "pp"), [("12", "4", "3"), ("20", "4", "5"), ("24", "4", "2"), ("12", "1", "4")])
def test_stages_may_fill_a_part_of_a_node_and_straddle_nodes(
    gpus: str, tp: str, pp: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["plan", "--model", "7b", "--seq", "64k", "--gpu", "h100", "--gpus", gpus, "--tp", tp, "--pp", pp]
    report = of_json(capsys, [*asked, "--accumulate", "6", "--host", "200GiB"])
    assert len(report["stages"]) == int(pp)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--pp", "4", "--chunks", "2"], "--chunks 2 is not possible with 1f1b, which gives a rank 1"),
        (
            ["--pp", "4", "--accumulate", "8", "--schedule", "zbv", "--chunks", "3"],
            "--chunks 3 is not possible with zbv, which gives a rank 2",
        ),
        (
            ["--pp", "4", "--accumulate", "8", "--schedule", "interleaved-1f1b", "--chunks", "1"],
            "--chunks 1 is too few for interleaved-1f1b; at least 2",
        ),
        (["--schedule", "zbv"], "--schedule zbv has no meaning without --pp"),
        (
            ["--pp", "4", "--accumulate", "6", "--schedule", "zbv"],
            "--accumulate 6 is too few for zbv on 4 pipeline ranks",
        ),
        (["--pp", "4", "--accumulate", "9", "--schedule", "interleaved-1f1b"], "does not divide into rounds"),
    ],
)
def test_a_schedule_that_cannot_be_is_refused_in_a_line(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["plan", "--model", "7b", "--seq", "64k", "--gpu", "h100", "--gpus", "8", *flags]
    assert main(asked) == ExitCode.USAGE
    assert words in assert_one_line(capsys)


def test_a_profile_of_curves_is_planned_shown_checked_and_simulated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With points beyond the three levels."""
    problem = with_curves(random_problem(3, layers=9, classes=2), 8, seed=3, held=True)
    plan = solve_problem(problem)
    used = {part.point for part in plan.layers}
    path = tmp_path / "plan.json"
    path.write_text(plan_to_json(plan))
    assert main(["check", str(path)]) == ExitCode.OK
    assert main(["simulate", str(path)]) == ExitCode.OK
    capsys.readouterr()
    assert main(["show", str(path)]) == ExitCode.OK
    shown = capsys.readouterr().out
    header = next(line for line in shown.splitlines() if line.startswith("layers"))
    assert header.split() == ["layers", "point", "bytes:", "kept", "host", "disk"]
    assert all(f" {point} " in shown for point in used)
    report = of_json(capsys, ["show", str(path)])
    assert sum(part["point"] != "all" for part in report["layer_plans"]) > 1
    profile, machine = tmp_path / "profile.json", tmp_path / "machine.json"
    profile.write_text(profile_to_json(problem.profile))
    machine.write_text(hardware_to_json(problem.hardware))
    budgets = ["--device", str(problem.budgets.device_bytes), "--host", str(problem.budgets.host_bytes)]
    again = of_json(capsys, ["plan", "--profile", str(profile), "--gpu", str(machine), *budgets])
    assert {part["point"] for part in again["layer_plans"]} > {"all"}


def test_throughput_is_of_the_job_and_of_each_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    run = ["plan", "--model", "7b", "--seq", "8k", "--gpu", "a800", "--gpus", "16", "--tp", "4"]
    report = of_json(capsys, run)
    assert report["tokens_per_s"] == pytest.approx(4 * 8192 / report["step_s"])
    assert report["tokens_per_s_per_gpu"] == pytest.approx(report["tokens_per_s"] / 16)
    assert 0.3 < report["mfu_causal"] < 0.7
    assert main(run) == ExitCode.OK
    shown = capsys.readouterr().out
    assert "dp 4, tp 4" in shown
    assert re.search(r"^[\d,]+ tokens/s on 16 GPUs, [\d,]+ each; mfu_causal", shown, re.MULTILINE)


def test_the_step_is_told_apart_by_cause(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = ["plan", "--model", "7b", "--seq", "8k", "--gpu", "a800", "--pp", "2", "--accumulate", "8"]
    one, many = (of_json(capsys, [*cluster, "--gpus", gpus]) for gpus in ("2", "256"))
    assert one["stages"][0]["communication_s"] == 0
    assert many["stages"][0]["sync_s"] > 0  # gradients, once a step
    assert many["step_s"] > one["step_s"]
    assert main([*cluster, "--gpus", "256", "-o", str(tmp_path / "plan.json")]) == ExitCode.OK
    table = capsys.readouterr().out
    for cause in ("compute", "recompute", "exposed reduction of gradients", "gather of updated weights", "bubble"):
        assert re.search(rf"^{cause}", table, re.MULTILINE), cause
    assert main(["simulate", str(tmp_path / "plan.json"), "-o", str(tmp_path)]) == ExitCode.OK
    assert re.search(r"^exposed communication +\S+ \S+ +\S+ \S+", capsys.readouterr().out, re.MULTILINE)
    (first, _) = sorted(tmp_path.glob("*.jsonl"))
    assert main(["trace", "stats", str(first)]) == ExitCode.OK
    assert re.search(r"collectives\s+\S+ m?s", capsys.readouterr().out)


def test_the_example_of_the_help_ends_in_an_answer(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "--model", "llama3-70b", "--seq", "128k", "--gpu", "h100", "--gpus"]
    assert main(["plan", "--help"]) == ExitCode.OK
    assert " ".join(["memo", *asked, "auto"]) in capsys.readouterr().out
    found = of_json(capsys, [*asked, "auto", "--precision", "bf16"])
    assert (found["gpus"], found["tp"], found["gpus_too_few"]) == (8, 8, [1, 2, 4])
    assert of_json(capsys, [*asked, "8", "--tp", "8", "--precision", "bf16"])["step_s"] == found["step_s"]
    assert main([*asked, "auto"]) == ExitCode.OK
    assert re.search(r"^fewest GPUs: \d+ --[ct]p \d+; 1, 2, 4", capsys.readouterr().out, re.MULTILINE)


def test_an_optimizer_on_the_host_of_several_gpus_costs_time_and_is_no_part_of_memo_train(
    capsys: pytest.CaptureFixture[str],
) -> None:
    asked = ["plan", "--model", "llama3-8b", "--seq", "8k", "--gpu", "h100", "--gpus", "8", "--precision", "bf16"]
    assert main([*asked, "--optimizer-offload"]) == ExitCode.OK
    shown = capsys.readouterr().out
    assert "are on the host (memo train has it for one GPU); published runs took several times" in shown
    update = re.search(r"^optimizer +(\d+) ms", shown, re.M)
    assert update is not None
    # 14 bytes a parameter of 8.03 billion at 360 GB/s of a node, and 2 there and 2 back over each GPU's part of the link.
    lanes, share = PRESETS["h100"].lanes(8), 8.03e9 / 8
    least_s = 8.03e9 * 14 / 360e9 + 2 * share / lanes.d2h_bytes_per_s + 2 * share / lanes.h2d_bytes_per_s
    assert float(update[1]) / 1e3 == pytest.approx(least_s, rel=0.02)
    assert 0.3 < least_s < 0.7


def test_mlps_in_tiles_cost_computation_and_hardware_flops(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "--model", "llama3-8b", "--seq", "128k", "--gpu", "h100", "--gpus", "8", "--cp", "8"]
    one, eight = (of_json(capsys, [*asked, "--mlp-tiles", tiles, "--precision", "bf16"]) for tiles in ("1", "8"))
    assert (one["status"], one["hfu"]) == ("optimal", one["mfu_causal"])
    extra = eight["stages"][0]["compute_s"] / one["stages"][0]["compute_s"] - 1
    assert main([*asked, "--mlp-tiles", "8", "--precision", "bf16"]) == ExitCode.OK
    added = re.search(r"hfu ([\d.]+)%; saving memory adds ([\d.]+)% to the computation", capsys.readouterr().out)
    assert added is not None
    assert float(added[2]) / 100 == pytest.approx(extra, abs=1e-3)
    assert extra > 0.1
    # Backward repeats five products of the size of the MLP's matrices.
    repeated = 5 * 2 * 4096 * 14336 * 32 / (8 * PRESETS["h100"].peak_flops) * eight["tokens_per_s"]
    assert eight["hfu"] - eight["mfu_causal"] == pytest.approx(repeated)


def test_assumptions_name_precision_states_kernel_host_and_model(
    plan_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["plan", "--model", "7b", "--seq", "8k", "--gpu", "h100", "--gpus", "8"]
    report = of_json(capsys, asked)
    assert report["assumed"][0] == (
        "bf16-autocast; 4 bytes of weight, 4 of gradient and 8 of adamw's state a parameter; attention by cuDNN; "
        "1.6 TiB of host memory a node"
    )
    assert report["assumed"][1].startswith("the model is memo's GPT, whose loss holds no logits")
    assert read_activation_plan(plan_path).problem.profile.signature.dtype == str(GPU_PRECISION)  # as memo train


def test_a_gpu_has_its_share_of_a_nodes_host_memory(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "--model", "7b", "--seq", "8k", "--gpu", "h100", "--precision", "bf16", "--gpus"]
    hosts = {gpus: of_json(capsys, [*asked, gpus])["budgets"]["host_bytes"] for gpus in ("1", "2", "8", "16")}
    whole = 0.8 * PRESETS["h100"].host_bytes
    shares = {"1": whole / 8, "2": whole / 4, "8": whole, "16": whole}
    assert hosts == {gpus: pytest.approx(share) for gpus, share in shares.items()}


def test_host_memory_that_is_nearly_full_is_warned_about(capsys: pytest.CaptureFixture[str]) -> None:
    (words,) = of_json(capsys, PAPER)["warnings"]
    told = (
        r"1\.9\d+ TiB of a node's 2 TiB of host memory are used, more than 80%; the program and the page cache need .*"
    )
    assert re.fullmatch(told, words)
    assert of_json(capsys, [*PAPER, "--host", "1.5TiB"])["warnings"] == []


def test_messages_in_flight_are_no_weights(capsys: pytest.CaptureFixture[str]) -> None:
    asked = [
        "plan",
        "--model",
        "7b",
        "--seq",
        "64k",
        "--gpu",
        "a100",
        "--gpus",
        "8",
        "--pp",
        "8",
        "--accumulate",
        "128",
    ]
    assert main([*asked, "--precision", "bf16"]) == ExitCode.INFEASIBLE
    shown = capsys.readouterr()
    assert "GiB of them for messages in flight, and a GPU's budget is" in shown.err
    assert re.search(r"^messages in flight +\d+", shown.out, re.M)


def test_equal_rows_are_one_row_and_an_mfu_above_100_percent_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "--model", "llama3-8b", "--seq", "1m", "--gpu", "h100", "--gpus", "8", "--cp", "8"]
    assert main([*asked, "--precision", "bf16"]) == ExitCode.OK
    shown = capsys.readouterr().out
    rows = shown[shown.index("\nlayers ") :].split("\n\n")[0].splitlines()[2:]
    shares = [re.split(r" {2,}", row, maxsplit=1)[1] for row in rows]
    assert len(set(shares)) == len(shares)
    plan = solve_problem(random_problem(1, layers=3))
    odd = dataclasses.replace(plan.problem.profile, model_flops_full_per_token=1e30)
    odd_plan = dataclasses.replace(plan, problem=dataclasses.replace(plan.problem, profile=odd))
    assert "(above 100 %: it counts attention's masked half, too, which no kernel computes)" in activation_table(
        odd_plan
    )
    assert "above 100" not in activation_table(plan)


def test_tensor_parallelism_beyond_a_node_is_warned_about(capsys: pytest.CaptureFixture[str]) -> None:
    wide = ["plan", "--model", "65b", "--seq", "128k", "--gpu", "a800", "--gpus", "64"]
    assert of_json(capsys, [*wide, "--tp", "8"])["warnings"] == []
    (words,) = of_json(capsys, [*wide, "--tp", "64"])["warnings"]
    assert words.startswith("tp 64 leaves the node of 8 GPUs: its collectives take ")


def test_fixed_methods_of_recompute_are_planned_beside_the_plans_own(capsys: pytest.CaptureFixture[str]) -> None:
    run = ["plan", "--model", "7b", "--seq", "32k", "--gpu", "a100-80g", "--gpus", "8"]
    own, full = (of_json(capsys, [*run, "--recompute", how]) for how in ("plan", "full"))
    assert full["model"] == "7b full recompute"
    assert full["budgets"]["host_bytes"] == 0
    # A third forward beside the forward and the backward of two.
    assert 1.2 < full["step_s"] / own["step_s"] < 4 / 3
    assert main([*run, "--recompute", "none"]) == ExitCode.INFEASIBLE
    assert_one_line(capsys)


@pytest.mark.parametrize(
    "run",
    [
        ["--model", "7b", "--seq", "16k", "--gpu", "h100", "--gpus", "8", "--host", "2TiB", "--precision", "bf16"],
        ["--model", "llama3-8b", "--seq", "8k", "--gpu", "h100", "--gpus", "8", "--cp", "8", "--cp-attention", "ring"],
        ["--model", "1.3b", "--seq", "4k", "--gpu", "a100-80g", "--gpus", "4", "--pp", "2", "--accumulate", "4"],
        ["--model", "7b", "--seq", "512", "--gpu", "h100", "--gpus", "8", "--precision", "bf16-autocast"],
    ],
    ids=lambda run: run[1],
)
def test_where_everything_fits_the_plan_is_that_without_recompute(
    run: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    own, none = (of_json(capsys, ["plan", *run, "--recompute", how]) for how in ("plan", "none"))
    assert own["stages"] == none["stages"]
    assert own["step_s"] == none["step_s"]


def test_what_is_sharded_and_offloaded_changes_the_memory(capsys: pytest.CaptureFixture[str]) -> None:
    run = ["plan", "--model", "7b", "--seq", "1k", "--gpu", "b200", "--gpus", "8", "--layers", "8"]
    peaks = [
        of_json(capsys, [*run, *more])["stages"][0]["peak_device_bytes"]
        for more in (["--zero", "0"], ["--zero", "1"], ["--zero", "2"], ["--zero", "3"], ["--optimizer-offload"])
    ]
    assert sorted(peaks, reverse=True) == peaks
    assert len(set(peaks)) == 5


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--mlp-tiles", "4", "--recompute", "full"], "--mlp-tiles 4 has no meaning with --recompute full"),
        (["--heads", "7"], "7 heads do not divide a hidden size of 4096"),
        (["--tp-overlap"], "--tp-overlap has no meaning without --tp; give --tp 2 or more"),
        (["--tp-overlap", "--gpus", "2", "--tp", "2", "--experts", "8"], "leave it out with --experts"),
    ],
)
def test_choices_that_contradict_are_refused_in_a_line(
    more: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--model", "7b", "--seq", "8k", "--gpu", "h100", *more]) == ExitCode.USAGE
    assert words in assert_one_line(capsys)


ROWS = ["plan", "--model", "llama3-8b", "--gpu", "h100", "--gpus", "8", "--precision", "bf16"]


def test_the_cheaper_exchange_of_the_embeddings_gradient_is_a_row_and_in_the_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    assert main([*ROWS, "--seq", "2k", "-o", str(path)]) == ExitCode.OK
    said = capsys.readouterr().out
    assert re.search(
        r"^embedding gradients: sparse exchange, 2\.7 ms \(dense 5 ms; sparse holds 1\.468 GiB more\)$", said, re.M
    )
    plan = read_activation_plan(path)
    assert plan.problem.profile.embedding_exchange is not None
    assert plan.problem.profile.embedding_exchange.sparse
    assert check_plan(plan) is None
    long = of_json(capsys, [*ROWS, "--seq", "32k"])["embedding_exchange"]
    assert not long["sparse"]
    assert long["dense_s"] < long["sparse_s"]


def test_an_exchange_that_takes_the_memory_of_activations_is_not_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    tight = [*ROWS, "--seq", "2k", "--host", "0", "--device", "20GiB"]
    assert of_json(capsys, [*ROWS, "--seq", "2k", "--device", "40GiB"])["embedding_exchange"]["sparse"]
    report = of_json(capsys, tight)
    assert not report["embedding_exchange"]["sparse"]
    asked = of_json(capsys, [*tight, "--embedding-exchange", "sparse"])
    assert asked["embedding_exchange"]["sparse"]
    assert asked["step_s"] > report["step_s"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model", "1.3b", "--gpus", "8"], "the embedding is the output projection, too"),
        (["--model", "7b", "--gpus", "8", "--tp", "8"], "no other rank has the embedding's rows"),
        (["--model", "7b", "--gpus", "8", "--zero", "1"], "under ZeRO 1"),
        (["--model", "qwen3-8b", "--gpus", "8"], "applies to sizes of memo's GPT only"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_sparse_exchange_that_is_not_possible_is_refused_in_a_line(
    capsys: pytest.CaptureFixture[str], flags: list[str], words: str
) -> None:
    command = ["plan", *flags, "--seq", "2k", "--gpu", "h100", "--embedding-exchange", "sparse"]
    assert main(command) == ExitCode.USAGE
    assert words in assert_one_line(capsys)


def test_a_codec_is_planned_shown_checked_and_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # A host that has no room for what products give, on a GPU whose own memory costs next to nothing.
    machine = dataclasses.replace(PRESETS["a800"], hbm_bytes_per_s=1e15)
    (tmp_path / "machine.json").write_text(hardware_to_json(machine))
    request = ["plan", "--model", "7b", "--seq", "64k", "--gpu", str(tmp_path / "machine.json"), "--gpus", "8"]
    request += ["--tp", "8", "--host", "100GiB", "--device", "14GiB", "--precision", "bf16"]
    exact, path, trace = of_json(capsys, request), tmp_path / "plan.json", tmp_path / "trace.jsonl"
    assert main([*request, "--codec", "int8", "-o", str(path)]) == ExitCode.OK
    shown = capsys.readouterr().out
    assert ", what moves as int8 codes" in shown
    assert re.search(r"^coding and decoding +", shown, re.MULTILINE)
    assert "gradients are near, not bit-identical" in shown
    report = of_json(capsys, ["show", str(path)])
    assert exact["codec"] is None
    assert report["codec"] == "int8"
    assert report["stages"][0]["coding_s"] > 0
    for command in (["check", str(path)], ["simulate", str(path), "-o", str(trace)]):
        assert main(command) == ExitCode.OK
        assert ", what moves as int8 codes" in capsys.readouterr().out
    copies = [json.loads(line) for line in trace.read_text().splitlines() if '"decoded_nbytes"' in line]
    assert all(copy["decoded_nbytes"] > copy["nbytes"] > 0 for copy in copies)
    assert copies


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model", "7b", "--seq", "8k", "--search"], "--codec does not go with --search"),
        (["--model", "7b", "--seq", "8k", "--recompute", "full"], "--codec int8 has no meaning with --recompute full"),
    ],
)
def test_a_codec_that_is_not_planned_is_one_line(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *flags, "--gpu", "a800", "--codec", "int8"]) == ExitCode.USAGE
    assert words in assert_one_line(capsys)


def test_a_measured_profile_has_the_codec_of_its_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "profile.json"
    path.write_text(profile_to_json(random_problem(0, layers=2).profile))
    assert main(["plan", "--profile", str(path), "--gpu", "a800", "--codec", "fp8"]) == ExitCode.USAGE
    assert "--codec fp8: the profile is of steps without a codec" in assert_one_line(capsys)
