"""Growing context: a resumed run at another length begins a stage, keeps its state, and stays exact within each stage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from memo.cli.main import main
from memo.errors import ExitCode
from memo.gpt.checkpoint.directory import Checkpoint
from memo.gpt.optim.lr_schedule import LrSchedule

SMALL = ["train", "--model", "tiny", "--layers", "2", "--hidden", "32", "--heads", "2", "--device", "cpu"]
ROTARY = [*SMALL, "--variant", "llama"]


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("".join(f"line {i}, {i * i}\n" for i in range(3000)))
    return tmp_path


def run(command: list[str], *flags: str) -> int:
    return main([*command, "--data", "text.txt", "--checkpoint-dir", "run", *flags])


def read(metrics: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in Path(metrics).read_text().splitlines()]


def settings(step: int) -> dict[str, Any]:
    return Checkpoint.at(Path("run") / f"step-{step:08d}").settings


def test_a_longer_context_goes_on_with_a_new_warmup_and_new_frequencies(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(ROTARY, "--seq", "64", "--batch", "2", "--steps", "4") == ExitCode.OK
    capsys.readouterr()
    longer = ["--seq", "256", "--rope-scaling", "yarn:4", "--steps", "14", "--warmup", "2", "--lr", "1e-4", "--resume"]
    assert run(ROTARY, *longer) == ExitCode.OK
    said = capsys.readouterr().out
    assert "stage    64 to 256 tokens a row from step 5 on, after 512 tokens" in said
    assert "warms up again for 2 steps to 0.0001, and falls to 1e-05 at step 14" in said
    assert "theta 10000, scaling none before, theta 10000, scaling yarn:4:64 now" in said
    assert "warning  batch was 2 in the checkpoint and is 1 now" in said
    assert "seq was" not in said
    kept = settings(14)
    assert kept["stage"] == {"begin": 4, "tokens": 512}
    assert kept["model"]["rope_scaling"] == {"kind": "yarn", "factor": 4.0, "original": 64}
    assert kept["model"]["rope_theta"] == 10_000.0


def test_a_run_resumed_within_a_later_stage_has_the_bits_of_an_uninterrupted_one() -> None:
    assert run(ROTARY, "--seq", "64", "--steps", "3") == ExitCode.OK
    first = Path("run/step-00000003")
    longer = ["--seq", "128", "--rope-theta", "50000", "--steps", "7"]
    saving = ["--data", "text.txt", "--checkpoint-dir"]
    assert main([*ROTARY, *longer, *saving, "whole", "--metrics", "whole.jsonl", "--resume", str(first)]) == ExitCode.OK
    # The schedule has the length of the whole run, so it is cut by its first checkpoint.
    cut = [
        *ROTARY,
        *longer,
        *saving,
        "cut",
        "--metrics",
        "cut.jsonl",
        "--checkpoint-every",
        "1",
        "--checkpoint-keep",
        "9",
    ]
    assert main([*cut, "--resume", str(first)]) == ExitCode.OK
    again = [*ROTARY, "--seq", "128", "--steps", "7", *saving, "again", "--metrics", "again.jsonl"]
    assert main([*again, "--resume", "cut/step-00000004"]) == ExitCode.OK  # without --rope-theta: the checkpoint's
    whole, resumed = read("whole.jsonl"), read("again.jsonl")
    assert [entry["step"] for entry in whole] == [4, 5, 6, 7]
    assert [(e["step"], e["loss"], e["grad_norm"]) for e in resumed] == [
        (e["step"], e["loss"], e["grad_norm"]) for e in whole[1:]
    ]


def test_weights_and_moments_are_those_of_the_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    from memo.gpt.train.step import Trainer

    assert run(ROTARY, "--seq", "64", "--steps", "3") == ExitCode.OK
    seen: list[dict[str, Any]] = []
    step = Trainer.step

    def watched(self: Trainer, number: int, **flags: Any) -> Any:
        if not seen:
            seen.append({name: value.clone() for name, value in _tensors(self.state())})
        return step(self, number, **flags)

    monkeypatch.setattr(Trainer, "step", watched)
    assert run(ROTARY, "--seq", "128", "--steps", "4", "--resume") == ExitCode.OK
    begun = seen.pop()
    saved = {name: torch.full_like(value, 7) for name, value in begun.items()}
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import load

    load(saved, storage_reader=FileSystemReader("run/step-00000003"), no_dist=True)
    assert any("exp_avg" in name for name in begun)
    for name, value in begun.items():
        assert torch.equal(value, saved[name]), name


def _tensors(state: Any, prefix: str = "") -> list[tuple[str, torch.Tensor]]:
    if isinstance(state, torch.Tensor):
        return [(prefix, state)]
    if isinstance(state, dict):
        return [
            found
            for key, value in state.items()
            for found in _tensors(value, f"{prefix}.{key}" if prefix else str(key))
        ]
    return []


def test_learned_positions_are_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(SMALL, "--seq", "64", "--steps", "1") == ExitCode.OK
    capsys.readouterr()
    assert run(SMALL, "--seq", "128", "--steps", "2", "--resume") == ExitCode.FAILURE
    said = capsys.readouterr().err
    assert "has learned positions, a table of 64 rows, so --seq stays as it is" in said
    assert said.count("\n") == 1
    assert run(SMALL, "--rope-theta", "1e6") == ExitCode.USAGE
    assert "--rope-theta applies to rotary positions, and tiny has learned ones" in capsys.readouterr().err


def test_positions_that_the_model_has_not_seen_are_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(ROTARY, "--seq", "64", "--steps", "1") == ExitCode.OK
    assert run(ROTARY, "--seq", "128", "--steps", "2", "--resume") == ExitCode.OK
    assert "the model has not seen those from 64 on; give --rope-theta or --rope-scaling" in capsys.readouterr().out
    assert run(ROTARY, "--seq", "64", "--steps", "3", "--resume") == ExitCode.OK
    assert "has not seen" not in capsys.readouterr().out


def test_a_stage_without_steps_and_another_model_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(ROTARY, "--seq", "64", "--steps", "2") == ExitCode.OK
    capsys.readouterr()
    assert run(ROTARY, "--seq", "128", "--steps", "2", "--resume") == ExitCode.USAGE
    assert "has 2 steps already, and --steps counts them" in capsys.readouterr().err
    assert run(ROTARY, "--seq", "128", "--layers", "3", "--steps", "3", "--resume") == ExitCode.FAILURE
    assert "of another model: layers 2 there, 3 here" in capsys.readouterr().err


def test_the_learning_rate_of_a_stage_counts_from_its_first_step() -> None:
    whole = LrSchedule(peak=1.0, floor=0.1, warmup=2, steps=10)
    later = LrSchedule(peak=1.0, floor=0.1, warmup=2, steps=110, begin=100)
    assert [later.at(100 + step) for step in range(1, 11)] == [whole.at(step) for step in range(1, 11)]
