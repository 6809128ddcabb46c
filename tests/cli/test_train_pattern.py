"""A pattern of full and local attention from end to end: planned by arithmetic, carried out bit for bit, resumed."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
from pathlib import Path

import ready_python

from memo.errors import ExitCode
from memo.mip.activation import read_activation_plan
from memo.mip.activation.files import hardware_to_json
from memo.mip.inputs import hardware_preset

SHAPE = [
    "--model",
    "local-tiny",
    "--sliding-window",
    "96",
    "--layers",
    "6",
    "--hidden",
    "64",
    "--heads",
    "4",
    "--full-every",
    "3",
]
RUN = ["--seq", "512", "--steps", "2", "--warmup", "1", "--on", "cpu", "--precision", "fp32"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
# So slow that moving, keeping and repeating are all worth something.
SLOW = {"peak_flops": 1e10, "hbm_bytes_per_s": 1e9, "duplex_bytes_per_s": 6e7, "gpus_per_node": 1, "network": None}
LINKS = ("d2h_bytes_per_s", "h2d_bytes_per_s", "node_d2h_bytes_per_s", "node_h2d_bytes_per_s")
MACHINE = dataclasses.replace(hardware_preset("h100"), **SLOW, **dict.fromkeys(LINKS, 1.5e7))


def memo(*flags: object) -> subprocess.CompletedProcess[str]:
    return ready_python.run("-m", "memo.cli.main", *map(str, flags), env=ENVIRONMENT)


def losses(metrics: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in metrics.read_text().splitlines()]


def test_a_pattern_is_planned_by_arithmetic_and_carried_out_bit_for_bit(tmp_path: Path) -> None:
    machine, plan = tmp_path / "machine.json", tmp_path / "plan.json"
    machine.write_text(hardware_to_json(MACHINE))
    asked = ["--seq", "512", "--precision", "fp32", "--gpu", machine, "--device", "15MiB", "--host", "64MiB"]
    planned = memo("plan", *SHAPE, *asked, "--mlp-tiles", "1", "-o", plan)
    assert planned.returncode == ExitCode.OK, planned.stderr
    found = read_activation_plan(str(plan))
    assert found.problem.profile.layers == ("local", "local", "block") * 2
    assert any(layer.recomputes for layer in found.layers)
    assert any(layer.host for layer in found.layers)
    assert memo("simulate", plan).returncode == ExitCode.OK

    plain = memo("train", *SHAPE, *RUN, "--metrics", tmp_path / "plain")
    assert plain.returncode == ExitCode.OK, plain.stderr
    assert "blocks of queries, by torch, within 96 tokens; in other layers flash, in torch" in plain.stdout
    given = ["--offload", "auto", "--plan", plan, "--host", "64MiB"]
    carried_out = memo("train", *SHAPE, *RUN, *given, "--metrics", tmp_path / "planned")
    assert carried_out.returncode == ExitCode.OK, carried_out.stderr
    assert losses(tmp_path / "planned") == losses(tmp_path / "plain")


def test_a_checkpoint_goes_on_with_its_own_pattern_alone(tmp_path: Path) -> None:
    saving = [*RUN, "--checkpoint-dir", tmp_path / "run", "--metrics", tmp_path / "metrics"]
    assert memo("train", *SHAPE, *saving).returncode == ExitCode.OK
    more = ["--steps", "3", "--resume"]
    refused = memo("train", *SHAPE, *saving, *more, "--sliding-window", "48")
    assert refused.returncode == ExitCode.FAILURE
    assert "is of another model: pattern {'window': 96, 'full_every': 3} there" in refused.stderr
    assert refused.stderr.count("\n") == 1
    resumed = memo("train", *SHAPE, *saving, *more)
    assert resumed.returncode == ExitCode.OK, resumed.stderr
    assert len(losses(tmp_path / "metrics")) == 3
