"""Plans that `memo plan --search` found, carried out by real ranks of `memo train` to the losses of one process."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from launching import run_ranks

from memo.cli.main import main
from memo.mip.activation import ActivationPlan, read_activation_plan
from memo.mip.activation.files import hardware_to_json
from memo.mip.inputs import AttentionKernel, Hardware, Network

SHAPE = ["--model", "tiny", "--layers", "8", "--hidden", "64", "--heads", "4", "--seq", "512"]
SEQUENCES, STEPS = 8, 2
# So slow that a tiny model takes longer than its collectives; links at which moving pays.
MACHINE = Hardware(
    name="slow",
    peak_flops=1e10,
    matmul_efficiency=0.8,
    attention=(AttentionKernel.alike(0.6),),
    device_bytes=1 << 34,
    hbm_bytes_per_s=1e9,
    d2h_bytes_per_s=1e9,
    h2d_bytes_per_s=1e9,
    duplex_bytes_per_s=2e9,
    node_d2h_bytes_per_s=8e9,
    node_h2d_bytes_per_s=8e9,
    nvlink_bytes_per_s=1e9,
    gpus_per_node=8,
    host_bytes=1 << 34,
    network=Network(nics_per_node=1, nic_bytes_per_s=1e9),
)


def losses(metrics: Path, ranks: int, *flags: str) -> list[float]:
    common = ["--on", "cpu", "--steps", str(STEPS), "--warmup", "1", "--metrics", str(metrics)]
    done = run_ranks(ranks, "-m", "memo.cli.main", "train", *flags, *common, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line)["loss"] for line in metrics.read_text().splitlines()]


def carried_out(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    searches: dict[str, list[str]],
    *,
    gpus: int,
    others: tuple[str, ...] = (),
) -> list[ActivationPlan]:
    """The plans found, each of which a dry run agrees with, and real ranks carry out to the losses of one process."""
    shape = [*SHAPE, *others]
    machine = folder / "machine.json"
    machine.write_text(hardware_to_json(dataclasses.replace(MACHINE, gpus_per_node=gpus)))
    asked = ["plan", "--search", *shape, "--precision", "fp32", "--gpu", str(machine), "--mlp-tiles", "1", "--json"]
    asked += ["--global-batch", str(SEQUENCES)]
    plans = []
    for name, flags in searches.items():
        path = str(folder / f"{name}.json")
        capsys.readouterr()
        assert main([*asked, *flags, "-o", path]) == 0
        found = json.loads(capsys.readouterr().out)
        plans.append(read_activation_plan(path))
        problem = plans[-1].problem
        assert problem.gpus == gpus
        # Sequences are drawn by microbatch.
        step = ["--batch", SEQUENCES // problem.pipeline.microbatches, "--accumulate", problem.pipeline.microbatches]
        alone = losses(folder / f"{name}-alone", 1, *shape, "--precision", "fp32", *map(str, step))
        assert len(set(alone)) == STEPS
        assert main(["dry-run", path]) == 0, capsys.readouterr().err
        assert losses(folder / name, gpus, *found["launch"]["train"]) == pytest.approx(alone, rel=1e-5), name
    return plans


def moves(plan: ActivationPlan) -> bool:
    return any(layer.host or layer.recomputes for layer in plan.layers)


def test_a_found_plan_is_carried_out_by_two_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (plan,) = carried_out(tmp_path, capsys, {"tight": ["--device", "8.5MiB"]}, gpus=2)
    assert moves(plan)


def test_a_found_plan_divides_experts_over_two_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    experts = ("--experts", "4", "--expert-hidden", "64", "--every", "2")
    searches = {"experts": ["--ep", "2", "--device", "15MiB"]}
    (plan,) = carried_out(tmp_path, capsys, searches, gpus=2, others=experts)
    assert plan.problem.profile.signature.ep == 2
    assert moves(plan)


@pytest.mark.parallel
def test_a_found_plan_shares_a_key_value_head_among_four_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    searches = {"shared": ["--cp", "4", "--device", "8MiB"]}
    (plan,) = carried_out(tmp_path, capsys, searches, gpus=4, others=("--variant", "llama"))
    assert plan.problem.profile.signature.cp == 4
    assert not plan.problem.profile.signature.ring
    assert moves(plan)


@pytest.mark.parallel
def test_three_found_plans_are_carried_out_by_eight_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    searches = {
        "any": [],
        "pipelined": ["--pp", "2", "--schedule", "interleaved-1f1b"],
        "tight": ["--dp", "2", "--device", "4.5MiB"],
    }
    plans = carried_out(tmp_path, capsys, searches, gpus=8)
    layouts = {
        (plan.problem.pipeline.stages, plan.problem.replicas, plan.problem.profile.signature.tp) for plan in plans
    }
    assert len(layouts) == 3
    assert moves(plans[-1])
