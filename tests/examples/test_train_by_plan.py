"""examples/train_1m.py carries out the plan it makes, layer by layer, and changes no loss: on this CPU, as on a GPU."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import pytest
from run_examples import EXAMPLES, example, run, run_on

from memo.mip.activation import ActivationPlan, read_activation_plan
from memo.mip.activation.files import hardware_to_json
from memo.mip.inputs import AttentionKernel, Hardware

MIB = 1 << 20
LAYERS, TOKENS = 6, 2048
TWO_CORES = Hardware(
    name="two cores",
    peak_flops=40e9,
    matmul_efficiency=0.5,
    attention=(AttentionKernel.alike(0.3),),
    device_bytes=1024 * MIB,
    hbm_bytes_per_s=5e9,
    d2h_bytes_per_s=1e9,
    h2d_bytes_per_s=1e9,
    duplex_bytes_per_s=2e9,
    node_d2h_bytes_per_s=2e9,
    node_h2d_bytes_per_s=2e9,
    nvlink_bytes_per_s=1e9,
    gpus_per_node=2,
    host_bytes=2048 * MIB,
)


def saved_bytes(plan: ActivationPlan) -> list[float]:
    """Saved bytes of each layer at the levels of the plan."""
    return [
        own.saved_bytes(known) for own, known in zip(plan.layers, plan.problem.profile.layer_profiles(), strict=True)
    ]


def moved_bytes(trace: Path, step: int) -> list[int]:
    """Bytes moved to the host in one step, by layer."""
    events = [event for event in map(json.loads, trace.read_text().splitlines()) if event.get("step") == step]
    layer = {event["id"]: event["module"] for event in events if event["k"] == "state" and event["to"] == "live"}
    moved: Counter[int] = Counter()
    for event in events:
        if event["k"] == "span" and event["lane"] == "d2h":
            moved[int(layer[event["id"]].rpartition(".")[2])] += event["nbytes"]
    return [moved[number] for number in range(LAYERS)]


def losses(metrics: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in metrics.read_text().splitlines()]


@pytest.mark.parametrize(("tp", "pp", "microbatches", "host"), [(1, 1, 1, 1 / 2), (2, 1, 1, 3 / 4), (1, 2, 3, 1 / 2)])
def test_a_plan_is_carried_out_layer_by_layer(tmp_path: Path, tp: int, pp: int, microbatches: int, host: float) -> None:
    machine, file, trace = (tmp_path / name for name in ("machine.json", "plan.json", "trace.rank0.jsonl"))
    machine.write_text(hardware_to_json(TWO_CORES))
    ranks, ways = tp * pp, ["--tp", tp, "--pp", pp, "--accumulate", microbatches]
    size = ["--layers", LAYERS, "--seq", TOKENS, *ways, "--precision", "bf16-autocast", "--mlp-tiles", 1]
    # Room for all first, to know how much to take away: three fifths of what the layers save, so that they differ.
    module = example("train_1m")
    asked = module.read([*module.PRESETS["laptop"], *map(str, size)])
    module.by_plan(asked, str(machine), str(file))
    free = read_activation_plan(file)
    assert free.declined is not None
    lacking = int(0.6 * sum(saved_bytes(free)) / pp)
    train = [EXAMPLES / "train_1m.py", "--preset", "laptop", *size, "--steps", 2, "--warmup", 0]
    budgets = [
        "--device",
        free.stages[0].peak_device_bytes - lacking,
        "--host",
        int(host * lacking) * ranks,
    ]
    by_plan = [
        *train,
        "--gpu",
        machine,
        "--plan-file",
        file,
        "--trace",
        tmp_path,
        *budgets,
        "--metrics",
        tmp_path / "by-plan",
    ]
    said = run_on(ranks, *by_plan)
    run_on(ranks, *train, "--offload", "none", "--metrics", tmp_path / "plain")

    assert losses(tmp_path / "by-plan") == losses(tmp_path / "plain")
    assert len(losses(tmp_path / "plain")) == 2
    assert "bytes: kept" in said
    plan = read_activation_plan(file)
    signature = plan.problem.profile.signature
    assert (signature.tokens, signature.tp, signature.pp, len(plan.layers)) == (TOKENS, tp, pp, LAYERS)
    assert len(plan.stages) == pp
    hosts = {layer.host for layer in plan.layers}
    # Kept and moved within one layer, or in one layer and not in another: no alpha says that.
    assert len(hosts) > 1
    assert tp > 1 or any(0 < host < 1 for host in hosts)
    first_stage = slice(LAYERS // pp)  # what the trace's rank has of the layers
    planned = [own.host * saved for own, saved in zip(plan.layers, saved_bytes(plan), strict=True)][first_stage]
    moved = [nbytes / microbatches for nbytes in moved_bytes(trace, step=2)][first_stage]
    # A storage goes to one place whole, so that fractions hold to within one of them, and so does their sum.
    largest = plan.problem.profile.classes[0].largest_storage_bytes
    assert all(abs(one - other) <= largest for one, other in zip(moved, planned, strict=True)), (moved, planned)
    assert abs(sum(moved) - sum(planned)) <= largest
    assert max(planned) - min(planned) > largest


def test_a_plan_for_something_else_is_told(tmp_path: Path) -> None:
    machine, file = tmp_path / "machine.json", tmp_path / "plan.json"
    machine.write_text(hardware_to_json(TWO_CORES))
    module = example("train_1m")
    module.by_plan(module.read([*module.PRESETS["laptop"], "--seq", "1k", "--layers", "2"]), str(machine), str(file))
    memo = [
        sys.executable,
        "-m",
        "memo.cli.main",
        "train",
        "--layers",
        2,
        "--steps",
        1,
        "--offload",
        "auto",
        "--plan",
        file,
    ]
    assert f"warning  {file} was made for tokens 1024 and not 512\n" in run(*memo, "--seq", 512)
    assert "warning" not in run(*memo, "--seq", 1024)


def test_a_choice_of_the_callers_is_not_overridden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = tmp_path / "machine.json"
    machine.write_text(hardware_to_json(TWO_CORES))
    module = example("train_1m")
    given: list[list[str]] = []
    monkeypatch.setattr(module, "memo", lambda argv: given.append(argv) or 0)
    flags = ["--preset", "laptop", "--seq", "2k", "--gpu", str(machine)]
    for more in ([], ["--alpha", "0.5", "--offload", "disk"], ["--offload", "none"]):
        monkeypatch.setattr(sys, "argv", ["train_1m.py", *flags, *more])
        assert module.main() == 0
    assert ["--plan" in argv for argv in given] == [True, False, False]
