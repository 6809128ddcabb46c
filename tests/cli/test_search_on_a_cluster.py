"""`memo plan --search --cluster`: the answer is that of planning every layout; what crosses a slow connection; refusals."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import shlex
from pathlib import Path
from typing import Any

import pytest

from memo.cli import plan as plan_command, train as train_command
from memo.cli.main import main
from memo.cli.planning.on_cluster import plan_on_cluster, space_on_cluster
from memo.errors import ExitCode, UsageError
from memo.mip.activation import DoesNotFit, check_plan, read_activation_plan
from memo.mip.inputs import PipelineSchedule
from memo.mip.simulate import verify_by_simulation

LAYERS, SEQUENCES = 4, 4
SMALL = ["--model", "125m", "--layers", str(LAYERS), "--seq", "4k"]


def cluster_file(folder: Path, *, gpus: tuple[str, str] = ("a800", "a800"), device: str = "80GiB") -> str:
    groups = [
        {"name": name, "gpu": gpu, "nodes": 1, "gpus_per_node": 2, "device": device}
        for name, gpu in zip(("a", "b"), gpus, strict=True)
    ]
    links = [{"between": ["a", "b"], "net": "1x25Gb"}]
    path = folder / "cluster.json"
    path.write_text(json.dumps({"format": "memo-cluster", "version": 1, "groups": groups, "links": links}))
    return str(path)


def parsed(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    plan_command.configure(parser)
    return parser.parse_args(flags)


def step_s(cluster: str, sizes: tuple[int, int, int, int], schedule: PipelineSchedule, zero: int, *rest: str) -> float:
    """The step of `memo plan --cluster` with a layout; infinite where it has no plan, or is none of this model."""
    pp, dp, cp, tp = sizes
    flags = [*SMALL, "--cluster", cluster, "--gpus", str(pp * dp * cp * tp), "--zero", str(zero), *rest]
    flags += ["--tp", str(tp), "--cp", str(cp), "--pp", str(pp), "--ep", "1", "--schedule", str(schedule)]
    try:
        return plan_on_cluster(space_on_cluster(parsed(*flags)))[0].step_s
    except (UsageError, DoesNotFit):
        return math.inf


def exhaustive(cluster: str) -> list[float]:
    """Steps of the best microbatch and sharding of every layout, ascending."""
    best: dict[object, float] = {}
    for sizes in itertools.product((1, 2, 4), repeat=4):
        pp, dp, *_ = sizes
        if math.prod(sizes) > 4:
            continue
        for batch in (size for size in (1, 2, 4) if SEQUENCES // dp % size == 0):
            times = SEQUENCES // dp // batch
            setting = ("--batch", str(batch), "--accumulate", str(times))
            for schedule, chunks in itertools.product(PipelineSchedule, (1, 2, 3, 4)):
                if chunks > 1 and (schedule.reason_not_chunks(chunks) is not None or LAYERS % (pp * chunks)):
                    continue
                if (chunks > 1) != (schedule.default_chunks > 1) or (pp == 1 and str(schedule) != "1f1b"):
                    continue
                if str(schedule) == "gpipe" and PipelineSchedule("1f1b").reason_unsupported(times, pp) is None:
                    continue  # in the same time 1f1b holds less
                if pp > 1 and schedule.reason_unsupported(times, pp) is not None:
                    continue
                of_chunks = ["--chunks", str(chunks)] if chunks > 1 else []
                key = (sizes, schedule, chunks)
                for zero in range(4) if sizes[1] * sizes[2] > 1 else (3,):
                    step = step_s(cluster, sizes, schedule, zero, *setting, *of_chunks)
                    best[key] = min(best.get(key, math.inf), step)
    return sorted(step for step in best.values() if math.isfinite(step))


@pytest.mark.parametrize(("gpus", "device"), [(("h100", "a800"), "80GiB"), (("a800", "a800"), "3GiB")])
def test_a_search_on_a_cluster_finds_what_planning_every_layout_does(
    tmp_path: Path, gpus: tuple[str, str], device: str, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = cluster_file(tmp_path, gpus=gpus, device=device)
    found = answer(capsys, ["plan", "--search", *SMALL, "--cluster", cluster, "--batch-tokens", "16k"])
    steps = exhaustive(cluster)
    assert [one["step_s"] for one in found["best"][:3]] == pytest.approx(steps[:3], rel=1e-9)
    assert found["proof"]["planned"] < len(steps)
    assert sum(found["proof"]["pruned"].values()) > 3 * len(steps)
    assert found["runs"]["zero"] in (3, None)


def test_what_crosses_a_slow_connection_is_what_has_fewer_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """1.3b of 8 layers, 2048 wide: 768 MiB of layers' weights, 8 x 12 x 2048 x 2048 x 2 bytes, are moved 3 times a step by
    ZeRO 3 where replicas cross; where the pipeline does, 64k tokens x 2048 x 2 bytes, 256 MiB, go there and back.
    """
    path, cluster = tmp_path / "plan.json", cluster_file(tmp_path)
    large = ["plan", "--search", "--model", "1.3b", "--layers", "8", "--seq", "4k", "--cluster", cluster, "--cp", "1"]
    large += ["--precision", "bf16"]
    weights, messages = 3 * 8 * 12 * 2048 * 2048 * 2, 2 * 64 * 1024 * 2048 * 2
    assert messages < weights < 8 * messages
    found = answer(capsys, [*large, "--batch-tokens", "64k", "-o", str(path)])
    assert found["best"][0]["placement"] == "stages 0 on a, 1 on b"
    assert found["best"][0]["places"] == [[{"group": name, "replicas": found["best"][0]["dp"]}] for name in ("a", "b")]
    written = read_activation_plan(path)
    assert found["plan"]["step_s"] == written.step_s == found["runs"]["step_s"]
    assert check_plan(written) is None
    verify_by_simulation(written)
    assert answer(capsys, [*large, "--batch-tokens", "512k"])["best"][0]["placement"].startswith("replicas: ")


def answer(capsys: pytest.CaptureFixture[str], flags: list[str]) -> dict[str, Any]:
    assert main([*flags, "--json"]) == ExitCode.OK
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--nodes", "2"], "--nodes does not go with --cluster"),
        (["--gpus-per-node", "2"], "--gpus-per-node does not go with --cluster"),
        (["--max-seq"], "not allowed with"),
        (["--gpu", "h100"], "--gpu does not go with --cluster"),
        (["--tp", "5"], "--tp 5 does not divide"),
    ],
)
def test_flags_that_contradict_a_search_on_a_cluster_are_refused_in_one_line(
    flags: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--search", *SMALL, "--cluster", cluster_file(tmp_path), *flags]) == ExitCode.USAGE
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_a_cluster_that_holds_no_layout_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = cluster_file(tmp_path, device="1GiB")
    flags = ["plan", "--search", "--model", "7b", "--seq", "4k", "--cluster", cluster, "--tp", "2", "--pp", "2"]
    assert main(flags) == ExitCode.INFEASIBLE
    assert "no layout of 7b at 4k tokens fits on the 4 GPUs" in capsys.readouterr().err


def test_each_run_of_nodes_has_its_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = cluster_file(tmp_path)
    flags = ["--search", *SMALL, "--cluster", cluster, "--global-batch", str(SEQUENCES)]
    stages = [*flags, "--pp", "2", "--tp", "2", "-o", str(tmp_path / "plan.json"), "--json"]
    assert main(["plan", *stages]) == ExitCode.OK
    report = json.loads(capsys.readouterr().out)
    lines = report["launch"]["torchrun"].splitlines()
    named = [line.partition(": ")[0] for line in lines]
    assert sorted(line.rpartition(" ")[2] for line in named) == ["a", "b"]
    for number, line in enumerate(lines):
        assert named[number].startswith(f"node {number}, of ")
        words = shlex.split(line.partition(": ")[2])
        inner = words.index("memo.cli.main")
        given = [words[words.index(flag) + 1] for flag in ("--nnodes", "--nproc-per-node", "--node-rank")]
        assert given == ["2", "2", str(number)]
        parser = argparse.ArgumentParser()
        train_command.configure(parser)
        train = parser.parse_args([*words[inner + 2 :], "--data", "text.txt"])
        assert str(train.plan) == str(tmp_path / "plan.json")
        problem = read_activation_plan(train.plan).problem
        assert (problem.pipeline.stages, problem.profile.signature.tp, problem.replicas) == (2, 2, 1)
    assert main(["plan", *flags, "--zero", "1", "--pp", "2", "--dp", "2"]) == ExitCode.OK
    assert "no launch line: memo train shards by ZeRO 3 alone" in capsys.readouterr().out


def test_an_answer_has_the_groups_and_the_placement_of_each_layout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster = cluster_file(tmp_path, gpus=("h100", "a800"))
    flags = ["--search", *SMALL, "--cluster", cluster, "--global-batch", str(SEQUENCES), "--pp", "2", "--tp", "2"]
    report = answer(capsys, ["plan", *flags, "--schedule", "1f1b"])
    assert [(one["name"], one["hardware"]) for one in report["groups"]] == [("a", "h100"), ("b", "a800")]
    planned = [point for point in report["points"] if point["status"] == "planned"]
    assert {point["placement"] for point in planned} >= {report["best"][0]["placement"]}
