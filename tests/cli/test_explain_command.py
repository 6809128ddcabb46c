"""`memo explain`: from a model's name, a configuration or a function of the user's, to tables and JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memo.cli.main import main
from memo.errors import ExitCode

SHORT = ["explain", "--seq", "32"]
LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 40,
    "num_attention_heads": 2,
    "vocab_size": 64,
}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "hidden_size": 32,
    "intermediate_size": 64,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 61,
    "first_k_dense_replace": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}


def config(folder: Path, **values: object) -> str:
    path = folder / "config.json"
    path.write_text(json.dumps(values))
    return str(path)


def test_a_preset_is_a_table_of_each_kind_of_layer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SHORT, "--model", "tiny", "--variant", "llama"]) == ExitCode.OK
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "tiny, 1 x 32 tokens, fp32"
    assert lines[2] == "layers.0 (Block), alpha 0"
    assert lines[-1] == "alike: layers.1"
    assert any(line.startswith("attention  <-") for line in lines)


def test_kinds_of_layers_of_a_configuration_are_told_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SHORT, "--model", config(tmp_path, **DEEPSEEK), "--json"]) == ExitCode.OK
    report = json.loads(capsys.readouterr().out)
    assert (report["tokens"], report["untold"]) == (32, {})
    dense, experts = report["kinds"]
    assert dense["layers"] == ["model.layers.0", "model.layers.1"]
    assert experts["layers"] == ["model.layers.2"]
    assert "aten.topk" in {row["operator"] for row in experts["rows"]} - {row["operator"] for row in dense["rows"]}


def test_the_level_is_the_point_in_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = config(tmp_path, **LLAMA)
    for level in ("matmuls", "attention", "input"):
        assert main([*SHORT, "--model", model, "--level", level, "--json"]) == ExitCode.OK
        (kind,) = json.loads(capsys.readouterr().out)["kinds"]
        assert [point["name"] for point in kind["points"] if point["is_used"]] == [level]
        assert kind["layers"] == ["model.layers.0", "model.layers.1"]


def test_a_fraction_is_a_cut_within_its_bytes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SHORT, "--model", config(tmp_path, **LLAMA), "--alpha", "0.5", "--json"]) == ExitCode.OK
    (kind,) = json.loads(capsys.readouterr().out)["kinds"]
    points = {point["name"]: point for point in kind["points"]}
    (used,) = (point for point in kind["points"] if point["is_used"])
    assert points["attention"]["kept_nbytes"] < used["kept_nbytes"]
    assert used["kept_nbytes"] <= (kind["saved_nbytes"] + points["attention"]["kept_nbytes"]) / 2
    assert used["replay_us"] < points["attention"]["replay_us"]


def test_one_layer_and_the_users_own_bans(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = config(tmp_path, **LLAMA)
    assert main([*SHORT, "--model", model, "--layers", "3", "--layer", "2", "--keep", "mm", "--json"]) == ExitCode.OK
    (kind,) = json.loads(capsys.readouterr().out)["kinds"]
    assert kind["layers"] == ["model.layers.2"]
    assert "kept, as chosen" in {row["why"] for row in kind["rows"]}
    assert main([*SHORT, "--model", model, "--layer", "model.layers.9"]) == ExitCode.USAGE
    assert "no layer 'model.layers.9'" in capsys.readouterr().err


def test_a_model_of_the_users_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "explained_model.py").write_text(
        "import torch\n"
        "class Outer(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(2))\n"
        "    def forward(self, x):\n"
        "        return self.layers[0](x).sin().sum()\n"
        "def build(*, batch, tokens):\n"
        "    model = Outer()\n"
        "    x = torch.zeros(batch, tokens, 8, requires_grad=True)\n"
        "    return model, lambda: model(x)\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main([*SHORT, "--model", "explained_model:build"]) == ExitCode.OK
    out = capsys.readouterr().out
    assert "\nlayers.0 (Linear), alpha 0\n" in out
    assert out.splitlines()[-1] == "layers.1 has no tape: no forward of it has run in the manager yet"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--batch", "0"], "--batch: 0 is less than 1"),
        (["--alpha", "1"], "--alpha: 1.0 is not from 0 to less than 1"),
        (["--model", "nowhere.json"], "nowhere.json: no such file"),
        (["--model", "nobody:there"], "nobody"),
        (["--keep", "aten.nothing"], "keep: no operator 'aten.nothing'; give names such as 'aten.mm' or 'mm'"),
        (["--repeat", "mm", "--keep", "mm"], "keep and repeat: 'mm' is in both"),
    ],
)
def test_a_wrong_argument_is_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SHORT, *arguments]) == ExitCode.USAGE
    error = capsys.readouterr().err
    assert error.startswith("memo explain: ")
    assert words in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "config.json: "),
        ({"model_type": "vit"}, "ViTConfig belongs to no language model"),
        ({**LLAMA, "hidden_size": 1 << 20, "vocab_size": 1 << 20}, "are free; lower --layers"),
    ],
)
def test_a_configuration_that_makes_no_model_is_one_line(
    values: dict[str, object], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SHORT, "--model", config(tmp_path, **values)]) == ExitCode.USAGE
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
