"""`memo plan` of a pattern of full and local attention: a table by class of layers, no ring, launch lines with its flags."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from memo.cli.main import main
from memo.errors import ExitCode
from memo.gpt import AttentionPattern
from memo.gpt.arithmetic import planned_run
from memo.mip.activation import read_activation_plan
from memo.search import Space

MODEL = ["--model", "mgpt-1.3b", "--layers", "4", "--seq", "32k", "--gpu", "h100"]


def test_a_plan_tells_classes_of_layers_apart_by_their_shares(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    assert (
        main(
            [
                "plan",
                *MODEL,
                "--device",
                "11GiB",
                "--host",
                "6GiB",
                "--mlp-tiles",
                "1",
                "--precision",
                "bf16",
                "-o",
                str(path),
            ]
        )
        == ExitCode.OK
    )
    lines = capsys.readouterr().out.splitlines()
    head = next(number for number, line in enumerate(lines) if line.startswith("class "))
    rows = {line.split()[0]: line.split() for line in lines[head + 1 : head + 3]}
    assert rows.keys() == {"local", "block"}
    plan = read_activation_plan(str(path))
    for known in plan.problem.profile.classes:
        words = rows[known.name]
        assert words[1] == "2"
        assert float(words[2]) == pytest.approx(1e3 * known.forward_s, rel=0.005)
        kept, host = (0.0 if word == "-" else float(word.rstrip("%")) for word in words[-4:-2])
        own = [
            layer for layer, name in zip(plan.layers, plan.problem.profile.layers, strict=True) if name == known.name
        ]
        shares = [layer.saved_bytes(known) / known.full_bytes for layer in own]
        assert kept == pytest.approx(50 * sum(layer.kept * s for layer, s in zip(own, shares, strict=True)), abs=0.06)
        assert host == pytest.approx(50 * sum(layer.host * s for layer, s in zip(own, shares, strict=True)), abs=0.06)


def test_a_search_tries_no_ring_and_launches_with_the_window(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Space] = []
    whole = Space.__dict__["shapes"].func
    monkeypatch.setattr(Space, "shapes", property(lambda self: found.append(self) or whole(self)))
    window = ["--sliding-window", "2k", "--full-every", "4"]
    asked = ["plan", "--search", *MODEL, *window, "--nodes", "1", "--cp", "2", "--batch-tokens", "128k", "--json"]
    assert main([*asked, "-o", str(tmp_path / "plan.json")]) == ExitCode.OK
    assert found
    assert not any(shape.ring for space in found for shape in whole(space))
    assert json.loads(capsys.readouterr().out)["launch"]["train"] == ["--plan", str(tmp_path / "plan.json")]
    pattern = planned_run(read_activation_plan(tmp_path / "plan.json")).config.pattern
    assert pattern == AttentionPattern(window=2048, full_every=4)


def test_a_ring_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    ring = ["--cp", "2", "--gpus", "2", "--cp-attention", "ring"]
    assert main(["plan", *MODEL, *ring]) == ExitCode.USAGE
    assert (
        capsys.readouterr().err == "memo plan: local attention is not possible with --cp-attention ring; use ulysses\n"
    )
