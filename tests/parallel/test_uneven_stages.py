"""Pipelines whose stages have different numbers of layers train as one process does, by flag and by plan."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from launching import torchrun

from memo.errors import UsageError
from memo.gpt import preset
from memo.parallel import Layout, PipelineSchedule

SHAPE = ["--layers", "6", "--hidden", "32", "--heads", "4", "--seq", "128"]
RUN = ["--on", "cpu", *SHAPE, "--steps", "3", "--global-batch", "4", "--accumulate", "4", "--warmup", "1"]
CLUSTER = {
    "format": "memo-cluster",
    "version": 1,
    "groups": [
        {"name": "new", "gpu": "h100", "nodes": 1, "gpus_per_node": 1},
        {"name": "old", "gpu": "a100-80g", "nodes": 1, "gpus_per_node": 1},
    ],
    "links": [{"between": ["new", "old"], "net": "1x100Gb"}],
}


def losses(path: Path, launcher: list[str], *flags: str) -> list[float]:
    command = [*launcher, "-m", "memo.cli.main", "train", *RUN, *flags, "--metrics", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line)["loss"] for line in path.read_text().splitlines()]


@pytest.mark.parallel
def test_uneven_stages_train_as_one_process_does(tmp_path: Path) -> None:
    alone = losses(tmp_path / "alone", [sys.executable])
    by_flag = losses(tmp_path / "flag", torchrun(2), "--pp", "2", "--stage-layers", "4,2")
    assert by_flag == pytest.approx(alone, rel=1e-5)  # float32 sums in another order
    assert len(set(alone)) == 3
    in_turns = ["--pp", "2", "--schedule", "interleaved-1f1b", "--stage-layers", "1,2,2,1"]
    assert losses(tmp_path / "turns", torchrun(2), *in_turns) == pytest.approx(alone, rel=1e-5)


@pytest.mark.parallel
def test_a_plan_for_a_cluster_is_carried_out_on_its_numbers_of_layers(tmp_path: Path) -> None:
    cluster, plan = tmp_path / "cluster.json", tmp_path / "plan.json"
    cluster.write_text(json.dumps(CLUSTER))
    asked = ["--model", "tiny", *SHAPE, "--precision", "fp32", "--cluster", str(cluster), "--pp", "2"]
    asked += ["--accumulate", "4", "--stage-layers", "4,2", "--mlp-tiles", "1", "-o", str(plan)]
    made = subprocess.run(
        [sys.executable, "-m", "memo.cli.main", "plan", *asked], capture_output=True, text=True, check=True
    )
    assert "4, 2" in made.stdout
    assert json.loads(plan.read_text())["problem"]["pipeline"]["layers"] == [4, 2]
    alone = losses(tmp_path / "alone", [sys.executable])
    flags = ["--pp", "2", "--offload", "auto", "--host", "64MiB", "--plan", str(plan)]
    assert losses(tmp_path / "planned", torchrun(2), *flags) == pytest.approx(alone, rel=1e-5)


def test_layers_of_stages_are_those_that_are_given() -> None:
    layout = Layout(pp=2, stage_layers=(5, 3))
    assert [layout.layers_of(stage, 8) for stage in (0, 1)] == [range(5), range(5, 8)]
    layout.check(preset("tiny", layers=8, hidden=64, heads=8), seq=64, batch=4, microbatches=4)
    odd = preset("tiny", layers=7, hidden=64, heads=8)
    Layout(pp=2, stage_layers=(4, 3)).check(odd, seq=64, batch=4, microbatches=4)
    with pytest.raises(UsageError, match=r"7 layers do not divide over 2 .*--stage-layers gives each its own number"):
        Layout(pp=2).check(odd, seq=64, batch=4, microbatches=4)
    with pytest.raises(UsageError, match="--stage-layers 5,3 are not the model's 7 layers"):
        layout.check(odd, seq=64, batch=4, microbatches=4)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"pp": 2, "stage_layers": (4, 2, 2)}, "has 3 numbers, and pipeline stages are 2 in all"),
        (
            {"pp": 2, "schedule": PipelineSchedule.INTERLEAVED, "stage_layers": (4, 4)},
            "has 2 numbers, and pipeline stages are 4 in all",
        ),
        ({"pp": 2, "stage_layers": (8, 0)}, "a stage of 0 layers"),
    ],
)
def test_numbers_of_layers_that_cannot_be_are_refused(sizes: dict[str, object], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Layout(**sizes)
