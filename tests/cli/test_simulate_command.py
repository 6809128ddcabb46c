"""`memo simulate`: what it says, the trace it writes, other machines, exit codes, hostile files."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
from activation_problems import plan_activations

from memo.cli.main import main
from memo.errors import ExitCode
from memo.gpt import preset
from memo.gpt.arithmetic import StepLayout, derive_profile
from memo.mip.activation import ActivationPlan, Budgets, Pipeline, plan_to_json, profile_to_json
from memo.mip.inputs import hardware_preset
from memo.trace.reader import read_trace

TIB = 1 << 40


def made_plan(pipeline: Pipeline = Pipeline()) -> ActivationPlan:  # noqa: B008  # frozen
    machine = hardware_preset("a800")
    layout = StepLayout(tokens=1 << 20, gpus=8 * pipeline.stages, tp=8, pp=pipeline.stages)
    profile = derive_profile(preset("7b"), machine, layout)
    budgets = Budgets(device_bytes=machine.device_bytes, host_bytes=2 * TIB, ranks_per_node=8)
    return plan_activations(profile, machine, budgets, pipeline)


@pytest.fixture(scope="module")
def plan() -> ActivationPlan:
    return made_plan()


@pytest.fixture
def plan_path(tmp_path: Path, plan: ActivationPlan) -> Path:
    path = tmp_path / "plan.json"
    path.write_text(plan_to_json(plan))
    return path


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    main(["simulate", *arguments, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert isinstance(found, dict)
    return found


def test_it_tells_times_stalls_peaks_and_agreement(plan_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", str(plan_path)]) == ExitCode.OK
    told = capsys.readouterr().out
    assert "1 x 1m tokens on a800, tp 8" in told
    for word in ("compute", "recompute", "stalls", "step", "device", "host", "80 GiB", "256 GiB", "they agree."):
        assert word in told


def test_json_figures_add_up_and_agree_with_the_plan(
    plan_path: Path, plan: ActivationPlan, capsys: pytest.CaptureFixture[str]
) -> None:
    found = shown(capsys, str(plan_path))
    (stage,) = found["stages"]  # type: ignore[misc]
    parts = [stage[f"{name}_s"] for name in ("compute", "communication", "recompute", "stall", "idle")]
    assert sum(parts) == pytest.approx(found["step_s"])
    assert sum(one["seconds"] for one in stage["stalls"]) == pytest.approx(stage["stall_s"])
    assert found["predicted_step_s"] == pytest.approx(plan.step_s)
    assert abs(float(str(found["off_percent"]))) <= 2
    assert found["tokens_per_s"] == pytest.approx((1 << 20) / float(str(found["step_s"])))
    assert found["fits"] is True
    assert [peak["over_nbytes"] for peak in stage["peaks"]] == [0, 0, 0]


def test_the_trace_opens_in_every_trace_command(
    plan_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    assert main(["simulate", str(plan_path), "-o", str(trace)]) == ExitCode.OK
    assert f"memo trace html {trace}" in capsys.readouterr().out
    header = read_trace(trace).meta
    assert header["simulated"] is True
    assert header["budgets"]["host"] == 2 * TIB // 8
    assert main(["trace", "stats", str(trace), "--json"]) == ExitCode.OK
    step = json.loads(capsys.readouterr().out)["ranks"][0]["steps"][0]
    assert step["duration_ns"] == pytest.approx(1e9 * float(str(shown(capsys, str(plan_path))["step_s"])), abs=1)
    assert main(["trace", "html", str(trace), "-o", str(tmp_path / "a.html")]) == ExitCode.OK
    assert main(["trace", "chrome", str(trace), "-o", str(tmp_path / "a.json")]) == ExitCode.OK
    assert main(["trace", "diff", str(trace), str(trace)]) == ExitCode.OK


def test_an_address_plan_is_refused_by_its_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text('{"format": "memo-address-plan", "version": 1}')
    assert main(["simulate", str(plan)]) == ExitCode.FAILURE
    said = f"memo simulate: {plan} is an address plan, not an activation plan; use memo show or memo check"
    assert capsys.readouterr().err.startswith(said)


def test_an_existing_trace_is_written_over_only_when_told(
    plan_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text("mine")
    assert main(["simulate", str(plan_path), "-o", str(trace)]) == ExitCode.FAILURE
    assert trace.read_text() == "mine"
    assert main(["simulate", str(plan_path), "-o", str(trace), "-f"]) == ExitCode.OK
    assert read_trace(trace).events


def test_every_stage_has_its_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    plan = made_plan(Pipeline(stages=2, microbatches=4))
    slowest = max(range(2), key=lambda stage: plan.stages[stage].microbatch_s)
    path.write_text(plan_to_json(plan))
    assert main(["simulate", str(path), "-o", str(tmp_path / "trace.jsonl")]) == ExitCode.USAGE
    assert "name an existing directory" in capsys.readouterr().err
    folder = tmp_path / "traces"
    folder.mkdir()
    assert main(["simulate", str(path), "-o", str(folder)]) == ExitCode.OK
    assert f"stage {slowest}, the slowest, is shown" in capsys.readouterr().out
    assert [read_trace(folder / f"trace.rank{rank}.jsonl").world_size for rank in range(2)] == [2, 2]


def test_another_machine_and_another_profile_take_the_place_of_the_plans(
    plan_path: Path, tmp_path: Path, plan: ActivationPlan, capsys: pytest.CaptureFixture[str]
) -> None:
    own, other = shown(capsys, str(plan_path)), shown(capsys, str(plan_path), "--hardware", "gh200")
    assert other["hardware"] == "gh200"
    assert other["stages"][0]["stall_s"] <= own["stages"][0]["stall_s"]  # type: ignore[index]
    slower = dataclasses.replace(
        plan.problem.profile,
        classes=tuple(
            dataclasses.replace(known, forward_s=2 * known.forward_s) for known in plan.problem.profile.classes
        ),
    )
    (tmp_path / "profile.json").write_text(profile_to_json(slower))
    twice = shown(capsys, str(plan_path), "--profile", str(tmp_path / "profile.json"))
    assert float(str(twice["step_s"])) > 1.1 * float(str(own["step_s"]))
    assert main(["simulate", str(plan_path), "--hardware", "abacus"]) == ExitCode.USAGE


def test_a_step_that_breaks_a_budget_is_shown_and_fails(
    plan: ActivationPlan, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    budgets = dataclasses.replace(plan.problem.budgets, host_bytes=TIB)
    tight = dataclasses.replace(plan, problem=dataclasses.replace(plan.problem, budgets=budgets))
    path, trace = tmp_path / "plan.json", tmp_path / "trace.jsonl"
    path.write_text(plan_to_json(tight))
    assert main(["simulate", str(path), "-o", str(trace)]) == ExitCode.PLAN_INVALID
    assert "DOES NOT FIT: host in layers." in capsys.readouterr().out
    assert read_trace(trace).events


def test_it_needs_no_torch(plan_path: Path, tmp_path: Path) -> None:
    arguments = ["simulate", str(plan_path), "-o", str(tmp_path / "trace.jsonl")]
    code = (
        f"import sys\nfrom memo.cli.main import main\nassert main({arguments}) == 0\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, cwd="/")


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"format": "memo-activation-plan", "version": 1}', "\x00" * 99])
def test_what_is_no_plan_is_refused_in_one_line(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    assert main(["simulate", str(path)]) == ExitCode.FAILURE
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith("memo simulate: ")
    assert said.err.count("\n") == 1
