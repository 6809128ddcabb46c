"""`memo train --plan` needs no other flag, and names the one that contradicts the plan."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import pytest

from memo.cli.main import main
from memo.cli.train import _config, configure
from memo.errors import ExitCode
from memo.gpt import EmbeddingGradients, OffloadMode, Precision, RunConfig

PLANNED = [
    *(
        "plan",
        "--model",
        "125m",
        "--layers",
        "6",
        "--kv-heads",
        "4",
        "--ffn",
        "1024",
        "--variant",
        "llama",
        "--seq",
        "16k",
    ),
    *("--gpu", "h100", "--gpus", "8", "--tp", "2", "--pp", "2", "--stage-layers", "4,2", "--global-batch", "16"),
    *("--accumulate", "4", "--sliding-window", "1k", "--precision", "bf16-autocast", "--embedding-exchange", "sparse"),
    *("--device", "2GiB", "--host", "64GiB"),
]


def config_of(*flags: object) -> RunConfig:
    parser = argparse.ArgumentParser()
    configure(parser)
    return _config(parser.parse_args(list(map(str, flags))))


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("plan") / "plan.json"
    assert main([*PLANNED, "-o", str(path)]) == ExitCode.OK
    return path


def test_a_plan_says_all_that_a_run_needs(plan: Path) -> None:
    config = config_of("--plan", plan, "--steps", 7)
    assert (config.model, config.shape.variant, config.seq) == ("125m", "llama", 16 << 10)
    shape = config.shape
    assert (shape.layers, shape.kv_heads, shape.ffn, shape.local_window) == (6, 4, 1024, 1024)
    layout = config.layout
    assert (layout.dp, layout.tp, layout.pp, layout.stage_layers) == (2, 2, 2, (4, 2))
    assert (config.batch, config.training.accumulate, config.training.schedule.steps) == (4, 4, 7)
    assert config.precision is Precision.BF16_AUTOCAST
    assert config.embedding_exchange is EmbeddingGradients.SPARSE
    assert (config.offload.mode, config.offload.host) == (OffloadMode.AUTO, 64 << 30)


def test_overlapped_tensor_parallelism_is_the_plans_or_added_to_it(
    plan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "overlapped.json"
    assert main([*PLANNED, "--tp-overlap", "-o", str(path)]) == ExitCode.OK
    assert config_of("--plan", path).layout.tp_overlap
    assert config_of("--plan", plan, "--tp-overlap").layout == config_of("--plan", path).layout
    assert not config_of("--plan", plan).layout.tp_overlap
    steps = []
    for each in (plan, path):
        capsys.readouterr()
        assert main(["simulate", str(each)]) == ExitCode.OK
        assert (", tp overlapped" in capsys.readouterr().out) == (each == path)
        assert main(["simulate", str(each), "--json"]) == ExitCode.OK
        steps.append(json.loads(capsys.readouterr().out)["step_s"])
    assert steps[1] < steps[0]


@pytest.mark.parametrize(
    "flags",
    [
        ("--model", "125m"),
        ("--seq", "16k", "--tp", "2", "--pp", "2", "--dp", "2", "--batch", "2", "--global-batch", "16"),
        ("--layers", "6", "--kv-heads", "4", "--sliding-window", "1k", "--variant", "llama"),
        ("--precision", "bf16-autocast", "--stage-layers", "4,2", "--offload", "auto"),
    ],
)
def test_flags_that_say_the_same_are_taken(plan: Path, flags: tuple[str, ...]) -> None:
    assert config_of("--plan", plan, *flags) == config_of("--plan", plan)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--model", "350m"), "--model 350m: .* is for 125m; leave --model out"),
        (("--variant", "gpt"), "--variant gpt: .* is for llama"),
        (("--seq", "32k"), "--seq 32768: .* is for 16384"),
        (("--tp", "4"), "--tp 4: .* is for 2"),
        (("--dp", "1"), "--dp 1: .* is for 2"),
        (("--schedule", "gpipe"), "--schedule gpipe: .* is for 1f1b"),
        (("--stage-layers", "3,3"), "--stage-layers"),
        (("--batch", "1"), "--batch 1: .* is for 2"),
        (("--accumulate", "2"), "--accumulate 2: .* is for 4"),
        (("--global-batch", "8"), "--global-batch 8: .* is for 16"),
        (("--precision", "bf16"), "--precision bf16: .* is for bf16-autocast"),
        (("--layers", "4"), "--layers 4: .* is for 6"),
        (("--experts", "4"), "--experts 4: .* is for none"),
        (("--expert-bottleneck", "4"), "--expert-bottleneck 4: .* is for none"),
        (("--sliding-window", "2k"), "--sliding-window 2048: .* is for 1024"),
        (("--mlp-tiles", "64"), "--mlp-tiles 64: .* is for"),
        (("--offload", "host"), "--plan has no meaning with --offload host"),
        (("--alpha", "0.5"), "--plan and --alpha both say what moves"),
    ],
    ids=lambda value: "" if isinstance(value, str) else value[0],
)
def test_a_flag_that_contradicts_the_plan_is_named(
    plan: Path, flags: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    assert main(["train", "--plan", str(plan), *flags]) == ExitCode.USAGE
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.count("\n") == 1
    assert re.search(said, told.err), told.err


@pytest.mark.parametrize(
    ("flags", "said"),
    [(("--lora", "8"), "trains all weights, not adapters"), (("--optimizer", "sgd"), "no optimizer but AdamW")],
)
def test_a_plan_of_what_memo_train_does_not_train_says_so(
    tmp_path: Path, flags: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    assert main(["plan", "--model", "125m", "--seq", "4k", "--gpu", "h100", *flags, "-o", str(path)]) == ExitCode.OK
    capsys.readouterr()
    assert main(["train", "--plan", str(path)]) != ExitCode.OK
    told = capsys.readouterr().err
    assert said in told
    assert told.count("\n") == 1
