"""Each example, run small: what a person would copy works."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from run_examples import EXAMPLES, example, run, run_on

from memo.mip.activation import read_activation_plan


def test_a_million_tokens_on_a_laptop_made_small(tmp_path: Path) -> None:
    """The laptop preset at 1k tokens: the plan first, then steps whose losses are those of the run without memo; resumed."""
    script, steps = EXAMPLES / "train_1m.py", ("--preset", "laptop", "--seq", "1k", "--warmup", 0, "--steps")
    losses = {}
    for name, flags in {"memo": (), "plain": ("--offload", "none")}.items():
        metrics, checkpoints = tmp_path / f"{name}.jsonl", tmp_path / name
        said = run(
            sys.executable, script, *steps, 2, *flags, "--metrics", metrics, "--checkpoint-dir", checkpoints
        )  # fmt: skip
        assert said.startswith("plan     alpha 0.25: 4.5 MiB a step to disk")
        lines = [json.loads(line) for line in metrics.read_text().splitlines()]
        losses[name] = [line["loss"] for line in lines]
        assert [line["disk_bytes"] for line in lines] == [0 if flags else 4718592] * 2
    assert losses["memo"] == losses["plain"]
    resumed = run(sys.executable, script, *steps, 3, "--checkpoint-dir", tmp_path / "memo", "--resume")
    assert "step-00000002" in resumed
    assert "\nstep 3  loss" in resumed


@pytest.mark.parametrize(
    ("flags", "says", "code"),
    [
        (("--model", "nowhere"), "--model nowhere: no such folder", 2),
        (("--seq", "64", "--alpha", "3"), "finetune_hf: alpha: 3.0 is no fraction", 2),
    ],
)
def test_what_cannot_be_finetuned_is_said_without_a_traceback(flags: tuple[str, ...], says: str, code: int) -> None:
    done = subprocess.run([sys.executable, EXAMPLES / "finetune_hf.py", *flags], capture_output=True, text=True)
    assert done.returncode == code
    assert says in done.stderr
    assert "Traceback" not in done.stderr


def test_what_does_not_fit_is_said_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = example("train_1m")
    monkeypatch.setattr(module.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(module.torch.cuda, "get_device_name", lambda: "NVIDIA H100 80GB HBM3")
    monkeypatch.setattr(module.torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80 << 30))
    monkeypatch.setattr(sys, "argv", ["train_1m.py", "--preset", "7b", "--tp", "1"])
    assert module.main() == 3
    errors = capsys.readouterr().err
    assert errors.startswith("train_1m: with MLPs in 64 tiles, no plan fits: the device lacks")
    assert errors.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "gpu", "memory", "host", "ranks"),
    [
        (["--preset", "350m"], "NVIDIA H200", 141 * 10**9, 2 << 40, 1),
        (["--preset", "350m", "--host", "128GiB"], "NVIDIA H200", 141 * 10**9, 1 << 40, 1),
        (["--preset", "350m", "--seq", "512k"], "NVIDIA H100 80GB HBM3", 80 << 30, 1 << 40, 1),
        (["--preset", "7b"], "NVIDIA A100-SXM4-80GB", 80 << 30, 2 << 40, 8),
        (["--preset", "7b", "--dp", "4"], "NVIDIA A800-SXM4-80GB", 80 << 30, 2 << 40, 8),
    ],
)
def test_the_plan_that_a_gpu_would_get(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    flags: list[str],
    gpu: str,
    memory: int,
    host: int,
    ranks: int,
) -> None:
    module = example("train_1m")
    monkeypatch.setattr(module.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(module.torch.cuda, "get_device_name", lambda: gpu)
    monkeypatch.setattr(module.torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=memory))
    monkeypatch.setattr(module.os, "sysconf", {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": host // 4096}.__getitem__)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    given: list[list[str]] = []
    monkeypatch.setattr(module, "memo", lambda argv: given.append(argv) or 0)
    file = tmp_path / "plan.json"
    monkeypatch.setattr(sys, "argv", ["train_1m.py", *flags, "--plan-file", str(file), "--steps", "2"])
    assert module.main() == 0
    table = capsys.readouterr().out
    assert "k tokens in" in table or "1m tokens in" in table
    assert "device, a GPU" in table
    (argv,) = given
    assert argv[argv.index("--plan") + 1] == str(file)
    plan = read_activation_plan(file)
    signature = plan.problem.profile.signature
    assert (signature.tokens, signature.batch) == ((512 if "512k" in flags else 1024) << 10, 1)
    assert signature.tp == ranks
    assert plan.problem.budgets.ranks_per_node == ranks
    budget = int(argv[argv.index("--host") + 1])
    assert budget == (128 << 30 if "128GiB" in flags else int(0.8 * host))
    if "128GiB" in flags:
        assert any(layer.recomputes for layer in plan.layers)  # not all of it has room there
    # memo train understands what comes after.
    from memo.cli.main import main

    monkeypatch.setenv("WORLD_SIZE", "3")
    assert main([*argv, "--on", "cpu"]) == 2
    assert "3" in capsys.readouterr().err  # the first complaint is of the number of processes, so all flags were read


def test_an_unmodified_hugging_face_model_is_finetuned_saved_and_found_again(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    script, flags = EXAMPLES / "finetune_hf.py", ("--seq", 512, "--steps", 2, "--digits", 9)
    saved = ("--output", tmp_path / "model")
    with_memo = run(sys.executable, script, *flags, "--alpha", 0.25, "--disk", tmp_path, *saved)
    plain = run(sys.executable, script, *flags, "--without-memo")
    losses = [re.findall(r"step \d  loss (\S+)", said) for said in (with_memo, plain)]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 2
    assert "a part of 8 of 8 layers, bit for bit" in with_memo
    again = run(sys.executable, script, "--model", tmp_path / "model", "--seq", 512, "--steps", 1)
    assert float(re.findall(r"step 1  loss (\S+)", again)[0]) < float(losses[0][0])  # it starts where the other ended


def test_two_processes_finetune_one_model_with_the_losses_of_one_and_save_it_whole(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    script, flags = EXAMPLES / "finetune_hf.py", ("--seq", 512, "--steps", 2, "--digits", 9)
    flags = (*flags, "--alpha", 0.25, "--disk", tmp_path)
    divided = run_on(2, script, *flags, "--tp", 2, "--output", tmp_path / "model")
    whole = run(sys.executable, script, *flags)
    losses = [[float(loss) for loss in re.findall(r"step \d  loss (\S+)", said)] for said in (divided, whole)]
    assert losses[0] == pytest.approx(losses[1], rel=2e-6)
    assert len(losses[0]) == 2
    again = run(sys.executable, script, "--model", tmp_path / "model", "--seq", 512, "--steps", 1)
    assert float(re.findall(r"step 1  loss (\S+)", again)[0]) < losses[0][0]
    alone = subprocess.run([sys.executable, script, "--tp", "2"], capture_output=True, text=True, check=False)
    assert alone.returncode == 1
    assert alone.stderr == (
        "finetune_hf: --tp times --pp times --dp times --cp is 2, and 1 processes were started; start them with torchrun "
        "--nproc-per-node 2\n"
    )


@pytest.mark.slow
def test_a_run_goes_on_in_another_layout_as_one_process_does(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    script, flags = EXAMPLES / "finetune_hf.py", ("--seq", 128, "--digits", 9, "--rows", 4, "--without-memo")
    whole = run(sys.executable, script, *flags, "--steps", 4)
    layout = ("--pp", 2, "--microbatches", 2)
    first = run_on(2, script, *flags, *layout, "--steps", 2, "--output", tmp_path / "model")
    then = run_on(2, script, *flags, "--cp", 2, "--steps", 2, "--resume", tmp_path / "model")
    losses = [[float(loss) for loss in re.findall(r"step \d  loss (\S+)", said)] for said in (whole, first + then)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert len(losses[0]) == 4


def test_from_nothing_to_a_plan_a_timeline_and_an_arena(tmp_path: Path) -> None:
    small = {"MODEL": "350m", "SEQ": "256k", "GPU": "h100", "GPUS": "1", "TP": "1", "RECORD_SEQ": "1k"}
    said = run("sh", EXAMPLES / "plan_without_gpu.sh", tmp_path / "out", **small)
    assert "checked, and simulated event by event" in said
    assert ": valid, " in said
    plan = read_activation_plan(str(tmp_path / "out" / "plan.json"))
    assert plan.problem.profile.signature.tokens == 256 << 10
    assert (tmp_path / "out" / "timeline.html").read_text().startswith("<!")
    assert (tmp_path / "out" / "arena.html").read_text().startswith("<!doctype html>")


def test_short_texts_can_be_packed_with_attention_within_them(tmp_path: Path) -> None:
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(json.dumps({"text": f"{number} green bottles " * 9}) + "\n" for number in range(50)))
    train = [
        sys.executable,
        EXAMPLES / "train_1m.py",
        "--preset",
        "laptop",
        "--data",
        texts,
        "--seq",
        "1k",
        "--layers",
        2,
    ]
    packed = ["--documents", "packed", "--steps", 1]
    masked, plain = ["--mask-documents"], ["--offload", "none"]
    losses = []
    for number, flags in enumerate((masked, [*masked, *plain], plain)):
        metrics = tmp_path / f"{number}.jsonl"
        said = run(*train, *packed, *flags, "--metrics", metrics)
        assert "rows     1k tokens anywhere in the text, across ends of documents" in said
        assert (", within documents" in said) == (flags != plain)
        losses.append(json.loads(metrics.read_text())["loss"])
    assert losses[0] == losses[1] != losses[2]
