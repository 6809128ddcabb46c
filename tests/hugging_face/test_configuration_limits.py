"""Configurations that nobody trains are refused in one line, before transformers builds anything of them."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from memo.cli.main import main
from memo.errors import ExitCode
from memo.hugging_face import configuration_from, model_class


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (
            '{"model_type": "llama", "num_hidden_layers": 1000000000}',
            "num_hidden_layers is 1000000000; a model has at most",
        ),
        (
            '{"model_type": "gemma3", "text_config": {"num_hidden_layers": 1000000000}}',
            "num_hidden_layers is 1000000000; a model has at most",
        ),
        ('{"model_type": "llama", "num_labels": 1000000000}', "num_labels is 1000000000; a model has at most"),
        ('{"model_type": "llama", "rope_theta": 1e400}', "the number 1e400 is too large"),
        ('{"model_type": "llama", "num_hidden_layers": Infinity}', "expected int, got float (value: inf)"),
        ('{"model_type": "llama", "vocab_size": NaN}', "expected int, got float (value: nan)"),
        ("[" * 100_000, "nested too deeply"),
        ("", "is empty"),
    ],
    ids=["layers", "inner layers", "labels", "infinite", "layers inf", "nan", "nested", "empty"],
)
def test_what_is_no_configuration_is_one_line(
    text: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    assert main(["plan", "--model", str(tmp_path), "--seq", "4k", "--gpu", "h100"]) == ExitCode.USAGE
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert says in said


@pytest.mark.parametrize("written", ["Infinity", '{"__float__": "Infinity"}'], ids=["json.dumps", "transformers"])
def test_numbers_that_json_has_not_are_read_as_transformers_reads_them(written: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    path.write_text(f'{{"model_type": "llama", "architectures": Infinity, "limits": [0.0, {written}]}}')
    config = configuration_from(str(path))
    assert config.limits == [0.0, math.inf]
    assert model_class(config, name="llama").__name__ == "LlamaForCausalLM"


def test_an_older_transformers_is_not_planned_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its models save other bytes than those that are predicted; measured ones are right."""
    transformers = pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    monkeypatch.setattr(transformers, "__version__", "4.57.6")
    assert main(["plan", "--model", str(tmp_path), "--seq", "4k", "--gpu", "h100"]) == ExitCode.USAGE
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "models of transformers 5 and newer are planned, and this is 4.57.6" in said
    assert "memo profile" in said
