"""`memo plan` of models by name and by configuration, its searches for a length and for GPUs."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from memo.cli.main import main
from memo.errors import ExitCode
from memo.gpt import Precision, preset
from memo.gpt.arithmetic import StepLayout, derive_profile
from memo.mip.inputs import PRESETS
from memo.search.request import GPT_WORDS

LLAMA = {
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
}
NAMED = (
    "qwen3-0.6b", "qwen3-4b", "qwen3-8b", "qwen3-32b", "qwen3-30b-a3b", "qwen3-235b-a22b", "gpt-oss-20b", "gpt-oss-120b",
    "mixtral-8x7b", "mixtral-8x22b",
)  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A local model's folder with nothing but its configuration."""
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    return tmp_path


def planned(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    assert main(["plan", *args, "--gpu", "h100", "--json"]) == ExitCode.OK
    printed: dict[str, Any] = json.loads(capsys.readouterr().out)
    return printed


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    assert main(["plan", *args, "--gpu", "h100"]) == ExitCode.USAGE
    (said,) = [
        line for line in capsys.readouterr().err.splitlines() if not line.endswith(" s")
    ]  # a slow machine's progress
    return said


@pytest.mark.parametrize("name", NAMED)
def test_ten_published_models_plan_without_a_network(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")

    def no_network(*_: object) -> None:
        raise AssertionError("a plan has no need of a network")

    monkeypatch.setattr(socket.socket, "connect", no_network)
    found = planned(capsys, "--model", name, "--seq", "4k", "--gpus", "64", "--loss-without-logits")
    assert found["layers"] > 20
    assert 0.05 < found["mfu_causal"] < 0.7


@pytest.mark.parametrize("spelled", ["config.json", ""])
def test_a_folder_or_its_file_names_the_model(folder: Path, spelled: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, "--model", str(folder / spelled), "--seq", "8k")
    assert found["layers"] == 4
    assert any("all logits" in sentence for sentence in found["assumed"])


def test_the_first_line_names_memos_gpt_of_its_own_sizes_alone(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for model, is_gpt in ((["125m"], True), (["125m", "--lora", "8"], True), ([str(folder)], False)):
        assert main(["plan", "--model", *model, "--seq", "8k", "--gpu", "h100"]) == ExitCode.OK
        assert ("memo's GPT" in capsys.readouterr().out.partition("\n")[0]) == is_gpt, model


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("llama3-8b", "llama3-8b is memo's GPT; the model of Hugging Face's transformers is llama-3-8b"),
        ("llama-3-8b", "llama-3-8b is the model of Hugging Face's transformers; memo's GPT of its size is llama3-8b"),
    ],
)
def test_one_name_is_one_model_in_every_command(name: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    shape = ["--model", name, "--layers", "2", "--seq", "128", "--loss-without-logits"]
    for command in (["plan", *shape, "--gpu", "h100"], ["rehearse", *shape, "--steps", "1"]):
        assert main(command) == ExitCode.OK
        assert capsys.readouterr().out.splitlines()[0] == line, command
    is_gpt = name == "llama3-8b"
    assert (GPT_WORDS in planned(capsys, *shape)["assumed"]) == is_gpt
    if not is_gpt:
        assert main(["train", "--model", name, "--data", "texts"]) == ExitCode.USAGE
        assert "or give llama3-8b, memo's GPT of its size" in capsys.readouterr().err


def test_the_loss_flag_of_before_names_the_one_of_now(capsys: pytest.CaptureFixture[str]) -> None:
    said = refused(capsys, "--model", "7b", "--seq", "8k", "--loss", "without-logits")
    assert "--loss is now --loss-without-logits" in said
    assert "unrecognized arguments: --loss-without" in refused(capsys, "--model", "7b", "--seq", "8k", "--loss-without")


def test_shape_flags_change_a_configuration(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert planned(capsys, "--model", str(folder), "--seq", "8k", "--layers", "6")["layers"] == 6


def test_what_does_not_apply_to_a_configuration_is_refused(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = ("--model", str(folder), "--seq", "8k")
    assert "--variant" in refused(capsys, *model, "--variant", "llama")
    assert "--mlp-tiles" in refused(capsys, *model, "--mlp-tiles", "4")
    assert "do not divide the model's" in refused(capsys, *model, "--tp", "3", "--gpus", "3", "--seq", "9k")
    assert "bf16 or fp32" in refused(capsys, *model, "--precision", "bf16-autocast")
    assert "give --lora RANK" in refused(capsys, *model, "--lora-dtype", "bf16")


def test_unknown_names_say_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert "qwen3-8b" in refused(capsys, "--model", "qwen9", "--seq", "8k")
    assert "nothing is fetched" in refused(capsys, "--model", "someone/qwen9", "--seq", "8k")
    assert "no such file" in refused(capsys, "--model", "missing.json", "--seq", "8k")


@pytest.mark.parametrize("model", ["125m", "folder"])
def test_the_longest_sequence_is_that_of_planning_each_length(
    model: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, device, count = ("125m", "2300MiB", 40) if model == "125m" else (str(folder), "100MiB", 16)
    flags = ("--model", name, "--device", device, "--host", "1GiB", "--precision", "bf16")
    found = planned(capsys, *flags, "--max-seq")["max_seq"]
    fit = [main(["plan", *flags, "--gpu", "h100", "--seq", f"{tiles}k"]) == ExitCode.OK for tiles in range(1, count)]
    assert fit == sorted(fit, reverse=True)
    assert 1 < sum(fit) < count - 1
    assert found == 1024 * sum(fit)


def test_the_longest_sequence_says_what_binds_and_what_would_lengthen_it(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--model", str(folder), "--vocab", "65536", "--device", "2GiB", "--max-seq", "--gpu", "h100")
    assert main(["plan", *flags]) == ExitCode.OK
    first, binds, proposal = capsys.readouterr().out.splitlines()[:3]
    assert first.startswith("longest sequence that fits:")
    assert "at the head" in binds
    assert re.fullmatch(
        r"a quarter longer or more: --loss-without-logits or --gpus 2 --cp 2 or --device [\d.]+GiB", proposal
    )


def test_where_no_length_fits_the_longest_sequence_says_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "--model", "llama3-70b", "--max-seq", "--gpu", "h100", "--gpus", "64", "--cp", "8"]
    assert main(asked) == ExitCode.INFEASIBLE
    (told,) = re.findall("; it fits with (.*?); the smallest device budget", capsys.readouterr().err)
    first = told.split(" or ")[0]
    assert "--seq" not in told
    assert main([*asked, *first.split()]) == ExitCode.OK


def test_memos_gpt_and_transformers_model_save_the_same_bytes_but_for_norms(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    from memo.hugging_face import PUBLISHED, HuggingFaceModel, configuration_from

    (tmp_path / "config.json").write_text(json.dumps(dict(PUBLISHED["llama-3-8b"].config)))
    other = HuggingFaceModel(configuration_from(str(tmp_path), name="llama"), name="llama", without_logits=True)
    layout, machine = StepLayout(tokens=4096, gpus=1), PRESETS["h100"]
    own = derive_profile(preset("llama3-8b"), machine, layout, precision=Precision.BF16).classes[0]
    (theirs,) = other.profile(machine, layout).classes
    assert own.static == theirs.static
    # Two norms, whose input transformers converts to float32.
    assert theirs.full_bytes - own.full_bytes == 2 * 4 * 4096 * layout.tokens
    assert "saves the input of each norm in float32, too" in GPT_WORDS


def test_the_fewest_gpus_are_the_first_of_which_a_plan_fits(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--model", "7b", "--seq", "256k", "--mlp-tiles", "8", "--precision", "bf16")
    found = planned(capsys, *flags, "--gpus", "auto")
    assert (found["gpus"], found["gpus_too_few"]) == (2, [1])
    assert main(["plan", *flags, "--gpus", "1", "--gpu", "h100"]) == ExitCode.INFEASIBLE
    capsys.readouterr()
    assert planned(capsys, *flags, "--gpus", "2")["step_s"] == found["step_s"]


DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "vocab_size": 129280,
}
LLAMA_405B = {
    "model_type": "llama",
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_hidden_layers": 126,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}


@pytest.mark.parametrize(
    ("model", "asked", "named"),
    [
        ("gpt-oss-120b", ("--seq", "128k", "--gpus", "8"), ["--loss-without-logits --gpus 48 --cp 2"]),
        (LLAMA_405B, ("--seq", "128k", "--gpus", "8"), ["--loss-without-logits --gpus 96 --tp 2 --cp 4"]),
        (DEEPSEEK_V3, ("--seq", "4k", "--gpus", "8"), ["--gpus 256 --tp 2"]),
    ],
    ids=["gpt-oss-120b", "llama-405b", "deepseek-v3"],
)
def test_changes_are_combined_where_no_single_one_fits(
    model: str | dict[str, Any],
    asked: tuple[str, ...],
    named: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("transformers")
    if not isinstance(model, str):
        (tmp_path / "config.json").write_text(json.dumps(model))
        model = str(tmp_path)
    flags = ("--model", model, *asked)
    assert main(["plan", *flags, "--gpu", "h100", "--json"]) == ExitCode.INFEASIBLE
    shown = capsys.readouterr()
    assert json.loads(shown.out)["fits"] == named
    assert "it fits with " + " or ".join(named) in shown.err
    for change in named:
        planned(capsys, *flags, *change.split())


def test_what_fits_together_fits_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    flags = ("--model", "gpt-oss-120b", "--seq", "128k", "--gpus", "64", "--cp", "8", "--loss-without-logits")
    assert planned(capsys, *flags)["layers"] == 36


def test_what_does_not_fit_in_any_way_says_what_was_tried(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wide = ("--hidden", "65536", "--ffn", "262144")  # one layer's weights are more than a GPU has
    assert main(["plan", "--model", str(folder), *wide, "--seq", "1k", "--gpu", "h100"]) == ExitCode.INFEASIBLE
    assert "no change that was tried fits, alone or together: up to 512 GPUs" in capsys.readouterr().err


def test_two_searches_exclude_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    assert "each looks for a size" in refused(capsys, "--model", "7b", "--max-seq", "--gpus", "auto")


def test_memo_train_refuses_models_of_transformers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--model", "qwen3-8b", "--data", "none", "--seq", "1k", "--steps", "1"]) == ExitCode.USAGE
    assert "under memo.offload" in capsys.readouterr().err
