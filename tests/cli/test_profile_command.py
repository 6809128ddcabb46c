"""`memo profile`: from a model's name, or a function of the user's, to a file that `memo plan` takes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memo.cli.main import main
from memo.errors import ExitCode
from memo.mip.activation import read_profile
from memo.mip.activation.files import hardware_to_json
from memo.mip.inputs import hardware_preset

TINY = ["profile", "--model", "tiny", "--seq", "128", "--layers", "2", "--repeats", "1"]


def test_a_profile_is_written_and_planned_with(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, machine = tmp_path / "profile.json", tmp_path / "machine.json"
    assert main([*TINY, "--disk", str(tmp_path), "-o", str(path)]) == ExitCode.OK
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == f"Wrote {path}"
    assert "attention" in out
    profile = read_profile(path)
    assert profile.signature.tokens == 128
    assert len(profile.layers) == 2
    machine.write_text(hardware_to_json(hardware_preset("a800")))
    assert main(["plan", "--profile", str(path), "--gpu", str(machine), "--json"]) == ExitCode.OK
    assert json.loads(capsys.readouterr().out)["status"] == "declined"
    for flag, given, words in (("--seq", "64", "of 128"), ("--tp", "8", "of 1"), ("--batch", "4", "of 1")):
        assert main(["plan", "--profile", str(path), "--gpu", str(machine), flag, given]) == ExitCode.USAGE
        assert f"{flag} {given}: the profile is {words}" in capsys.readouterr().err
    assert main(["plan", "--profile", str(path), "--gpu", str(machine), "--seq", "128", "--json"]) == ExitCode.OK


def test_a_model_of_the_users_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "profiled_model.py").write_text(
        "import torch\n"
        "def build(*, batch, tokens):\n"
        "    layer = torch.nn.TransformerEncoderLayer(32, 2, batch_first=True)\n"
        "    model = torch.nn.TransformerEncoder(layer, 2)\n"
        "    x = torch.zeros(batch, tokens, 32, requires_grad=True)\n"
        "    return model, lambda: model(x).sum()\n"
    )
    monkeypatch.chdir(tmp_path)
    assert (
        main(["profile", "--model", "profiled_model:build", "--seq", "64", "--repeats", "1", "--json"]) == ExitCode.OK
    )
    report = json.loads(capsys.readouterr().out)
    assert report["role"] == "measured"
    assert report["layers"] == ["TransformerEncoderLayer"] * 2


def test_a_step_that_runs_backward_itself_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "whole_step.py").write_text(
        "import torch\n"
        "def build(*, batch, tokens):\n"
        "    layer = torch.nn.TransformerEncoderLayer(32, 2, batch_first=True)\n"
        "    model = torch.nn.TransformerEncoder(layer, 2)\n"
        "    x = torch.zeros(batch, tokens, 32, requires_grad=True)\n"
        "    return model, lambda: model(x).sum().backward()\n"
    )
    monkeypatch.chdir(tmp_path)
    assert main(["profile", "--model", "whole_step:build", "--seq", "16", "--repeats", "1"]) == ExitCode.FAILURE
    error = capsys.readouterr().err
    assert "the step of whole_step:build runs backward itself" in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--batch", "0"], "--batch: 0 is less than 1"),
        (["--model", "nobody:there"], "nobody"),
        (["--model", "tinier"], "unknown model"),
        (["--model", "tiny", "--seq", "none"], "cannot read"),
    ],
)
def test_usage_errors_are_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["profile", *arguments]) == ExitCode.USAGE
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1
