"""`memo train` as a person meets it: a process with flags, signals, files and an exit code."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ready_python

from memo.gpt import PRESETS

SMALL = ["--model", "tiny", "--layers", "2", "--hidden", "64", "--heads", "1", "--seq", "256", "--on", "cpu"]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text.txt"
    path.write_text("".join(f"line {i} of a small training text, {i * i}\n" for i in range(2000)))
    return path


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Path]:
    """The scratch directory of a run; whatever the run did, it must be empty afterwards."""
    path = tmp_path / "scratch"
    path.mkdir()
    yield path
    assert list(path.iterdir()) == []


def command(*flags: object) -> list[str]:
    return [sys.executable, "-m", "memo.cli.main", "train", *map(str, flags)]


def memo_train(*flags: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return ready_python.run(*command(*flags)[1:], env=ENVIRONMENT, cwd=cwd)


def start(*flags: object) -> subprocess.Popen[str]:
    return subprocess.Popen(command(*flags), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT)


def wait_for_steps(process: subprocess.Popen[str], metrics: Path, count: int, *, saved_in: Path | None = None) -> None:
    """Waits for steps, and for a checkpoint, which is written while training goes on."""
    deadline = time.monotonic() + 180
    while (
        not metrics.exists()
        or metrics.read_text().count("\n") < count
        or (saved_in is not None and not any(saved_in.glob("step-*")))
    ):
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)


def losses(metrics: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in metrics.read_text().splitlines()]
    assert [line["step"] for line in lines] == list(range(1, len(lines) + 1))  # each step once, in order
    return {line["step"]: line["loss"] for line in lines}


def assert_one_line(result: subprocess.CompletedProcess[str], *, code: int, says: str) -> None:
    assert result.returncode == code, result.stderr
    assert result.stderr.count("\n") == 1, result.stderr
    assert result.stderr.startswith("memo train: ")
    assert says in result.stderr


def test_help_names_every_preset_and_needs_no_torch() -> None:
    program = (
        "import sys; from memo.cli.main import main; code = main(['train', '--help']); "
        "sys.exit(9 if 'torch' in sys.modules else code)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert ", ".join(PRESETS) in " ".join(result.stdout.split())


def test_a_plan_says_in_how_many_tiles_the_mlps_are_computed(text: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    asked = ["--model", "tiny", "--seq", "512", "--gpu", "h100", "--precision", "fp32", "--mlp-tiles", "4"]
    made = subprocess.run(
        [sys.executable, "-m", "memo.cli.main", "plan", *asked, "-o", str(plan)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "MLPs in 4 tiles" in made.stdout
    run = ["--model", "tiny", "--seq", "512", "--on", "cpu", "--data", text, "--steps", "1"]
    run += ["--offload", "auto", "--host", "64MiB", "--plan", plan]
    followed = memo_train(*run)
    assert followed.returncode == 0, followed.stderr
    refused = memo_train(*run, "--mlp-tiles", "2")
    assert refused.returncode == 2
    assert refused.stderr.endswith(f"--mlp-tiles 2: {plan} is for 4; leave --mlp-tiles out, or plan again with it\n")


def test_a_codec_from_the_command_line_is_told_at_the_end(text: Path) -> None:
    run = ["--model", "tiny", "--seq", "256", "--on", "cpu", "--data", text, "--steps", "2"]
    done = memo_train(*run, "--offload", "host", "--host", "64MiB", "--codec", "fp8")
    assert done.returncode == 0, done.stderr
    assert re.search(r"^codec: .* offloaded as .*, largest error 3\.\d+ %", done.stdout, re.MULTILINE)


def test_tiles_and_masked_documents_from_the_command_line(text: Path, tmp_path: Path) -> None:
    # Rows of a small file in many documents: masks change the loss, tiles do not, and a run may go on with others.
    documents = tmp_path / "documents.jsonl"
    documents.write_text("".join(json.dumps({"text": f"line {i}, {i * i}"}) + "\n" for i in range(2000)))
    found = {}
    pool = tmp_path / "pool"
    split = ("--offload", "host", "--host", "64MiB", "--host-pool", pool, "--alpha", 0.25)
    runs: dict[str, tuple[object, ...]] = {
        "plain": (),
        "masked": ("--mask-documents",),
        "tiled": ("--mlp-tiles", 4),
        "split": ("--mask-documents", "--mlp-tiles", 4, *split),
    }
    for name, flags in runs.items():
        metrics, checkpoints = tmp_path / f"{name}.jsonl", tmp_path / name
        files = ("--metrics", metrics, "--checkpoint-dir", checkpoints)
        done = memo_train(*SMALL, "--data", documents, "--steps", 2, *files, *flags)
        assert done.returncode == 0, done.stderr
        assert done.stdout.count("attention flash, in torch") == 1
        assert ("within documents" in done.stdout) == ("--mask-documents" in flags)
        assert "whole tensors" not in done.stderr
        found[name] = losses(metrics)
    assert found["tiled"] == found["plain"]
    assert found["masked"] != found["plain"]
    assert found["split"] == found["masked"]
    resumed = memo_train(*SMALL, "--data", documents, "--steps", 3, "--checkpoint-dir", tmp_path / "tiled", "--resume")
    assert resumed.returncode == 0, resumed.stderr
    refused = memo_train(
        *SMALL,
        "--data",
        documents,
        "--steps",
        4,
        "--checkpoint-dir",
        tmp_path / "tiled",
        "--resume",
        "--mask-documents",
    )
    assert refused.returncode == 1
    assert "end_of_document None there, 256 here" in refused.stderr


def test_whole_documents_from_the_command_line_resumed_too(tmp_path: Path) -> None:
    documents = tmp_path / "documents.jsonl"
    texts = [str(number) * length for number, length in enumerate((100, 600, 800, 1000))]
    documents.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    schedule = ["--warmup", 0, "--lr", 3e-4, "--min-lr", 3e-4]  # the same in a run of any length
    train = [*SMALL, *schedule, "--data", documents, "--accumulate", 2, "--eval-every", 2, "--eval-steps", 1]
    whole = [*train, "--documents", "whole"]
    straight = memo_train(*whole, "--steps", 4, "--metrics", tmp_path / "straight")
    assert straight.returncode == 0, straight.stderr
    # They make 0, 2, 3 and 3 rows of 256; the one of two is for evaluation.
    assert "3 of 4 have as many, the longest 1,000; an epoch is 6 rows of 2 documents" in straight.stdout
    saving = ["--checkpoint-dir", tmp_path / "run"]
    assert memo_train(*whole, *saving, "--steps", 2, "--metrics", tmp_path / "resumed").returncode == 0
    assert memo_train(*whole, *saving, "--steps", 4, "--metrics", tmp_path / "resumed", "--resume").returncode == 0
    assert losses(tmp_path / "resumed") == losses(tmp_path / "straight")
    changed = memo_train(*train, *saving, "--steps", 5, "--resume")
    assert "warning  --documents was whole in the checkpoint and is packed now" in changed.stdout
    short = memo_train(*whole, "--seq", 2000)
    assert_one_line(short, code=1, says="no document has 2000 tokens: the longest of 4 has 1000")


def test_offload_to_disk_gives_the_same_losses_and_counts_what_it_moved(
    text: Path, tmp_path: Path, scratch: Path
) -> None:
    flags = [*SMALL, "--data", text, "--steps", 3, "--accumulate", 2, "--eval-every", 2, "--eval-steps", 2]
    plain = memo_train(*flags, "--metrics", tmp_path / "plain")
    assert plain.returncode == 0, plain.stderr
    trace = tmp_path / "trace.rank0.jsonl"
    disk = ["--offload", "disk", "--disk", scratch, "--disk-budget", "256MiB", "--trace", trace]
    moved = memo_train(*flags, *disk, "--metrics", tmp_path / "moved")
    assert moved.returncode == 0, moved.stderr
    assert losses(tmp_path / "plain") == losses(tmp_path / "moved")
    lines = [json.loads(line) for line in (tmp_path / "moved").read_text().splitlines()]
    assert all(line["disk_bytes"] > 0 for line in lines)
    assert all(line["host_bytes"] == 0 for line in lines)
    assert [line["step"] for line in lines if "eval_loss" in line] == [2, 3]
    assert json.loads(trace.read_text().splitlines()[0])["format"] == "memo-trace"
    assert plain.stderr == ""
    assert moved.stderr == ""
    assert moved.stdout.splitlines()[-1].startswith(f"Wrote {trace} (")
    assert [line.split()[:2] for line in plain.stdout.splitlines() if line.startswith("step")] == [
        ["step", "1"],
        ["step", "2"],
        ["step", "3"],
    ]


def test_ctrl_c_saves_and_the_resumed_run_ends_with_the_losses_of_an_uninterrupted_one(
    text: Path, tmp_path: Path
) -> None:
    flags = [*SMALL, "--data", text, "--steps", 40, "--dropout", 0.1]
    straight = memo_train(*flags, "--metrics", tmp_path / "straight")
    assert straight.returncode == 0, straight.stderr
    saving = [*flags, "--metrics", tmp_path / "m", "--checkpoint-dir", tmp_path / "run"]
    process = start(*saving)
    wait_for_steps(process, tmp_path / "m", 2)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    done = len(losses(tmp_path / "m"))
    assert 2 <= done < 40
    saved = tmp_path / "run" / f"step-{done:08d}"
    assert output.endswith(f"stopped after step {done}; saved in {saved}; continue with --resume\n")
    assert [path.name for path in (tmp_path / "run").iterdir()] == [f"step-{done:08d}"]
    resumed = memo_train(*saving, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert losses(tmp_path / "m") == losses(tmp_path / "straight")


def test_a_run_whose_output_nobody_reads_any_more_saves_its_steps(text: Path, tmp_path: Path) -> None:
    """Ctrl-C in `memo train | tee log` ends tee, too."""
    process = start(
        *SMALL, "--data", text, "--steps", 1000, "--metrics", tmp_path / "m", "--checkpoint-dir", tmp_path / "run"
    )
    wait_for_steps(process, tmp_path / "m", 1)
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(60) == 0
    assert process.stderr is not None
    process.stderr.close()
    done = len(losses(tmp_path / "m"))
    assert [path.name for path in (tmp_path / "run").iterdir()] == [f"step-{done:08d}"]


def test_a_stop_without_checkpoints_says_how_to_keep_the_steps(text: Path, tmp_path: Path) -> None:
    process = start(*SMALL, "--data", text, "--steps", 1000, "--metrics", tmp_path / "m")
    wait_for_steps(process, tmp_path / "m", 1)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert output.endswith("nothing was saved; give --checkpoint-dir to save steps and resume\n")
    assert errors == "memo train: stopping after this step; interrupt again to stop at once\n"


def test_sigterm_is_the_same_request(text: Path, tmp_path: Path) -> None:
    process = start(
        *SMALL, "--data", text, "--steps", 1000, "--metrics", tmp_path / "m", "--checkpoint-dir", tmp_path / "run"
    )
    wait_for_steps(process, tmp_path / "m", 1)
    process.terminate()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert len(list((tmp_path / "run").iterdir())) == 1


def test_kill_9_leaves_nothing_in_the_scratch_directory_and_training_resumes(
    text: Path, tmp_path: Path, scratch: Path
) -> None:
    flags = [*SMALL, "--data", text, "--steps", 30, "--offload", "disk", "--disk", scratch]
    straight = memo_train(*flags, "--metrics", tmp_path / "straight")
    assert straight.returncode == 0, straight.stderr
    saving = [*flags, "--metrics", tmp_path / "m", "--checkpoint-dir", tmp_path / "run", "--checkpoint-every", 2]
    process = start(*saving)
    wait_for_steps(process, tmp_path / "m", 5, saved_in=tmp_path / "run")
    process.kill()
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL
    assert list(scratch.iterdir()) == []
    resumed = memo_train(*saving, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert "step-0000" in resumed.stdout
    assert losses(tmp_path / "m") == losses(tmp_path / "straight")


# What is refused before torch is imported is cheap to test; the rest shares one process start each.
USAGE = [
    (["--steps", "-1"], "steps -1 is less than 1"),
    (["--seed", "9" * 30], "--seed is above"),
    (["--clip", "-1"], "0 is no clipping"),
    (["--offload", "host", "--host", "0"], "--host 0 leaves --offload host no memory"),
    (["--model", "9b"], "one of tiny, moe-tiny, local-tiny, 125m"),
    (["--sliding-window", "0"], "is not a whole number of tokens from 1"),
    (["--offload", "disk", "--host", "8 gigs"], "write for instance 8GiB"),
    (["--offload", "everywhere"], "none, host, disk, auto"),
    (["--offload", "host", "--host-pool", "pool"], "--host-pool needs --host SIZE"),
    (["--offload", "none", "--host", "8GiB"], "--host has no meaning with --offload none"),
    (
        ["--offload", "none", "--codec", "int8"],
        "--codec has no meaning with --offload none; use --offload host",
    ),
    (["--offload", "none", "--trace"], "--trace has no meaning with --offload none"),
    (
        ["--offload", "host", "--disk", "/"],
        "--disk has no meaning with --offload host; use --offload disk or auto",
    ),
    (["--seq", "32kk"], "write for instance 4096, 32k or 1m"),
    (["--steps", "0"], "steps 0"),
    (["--batch", "0"], "--batch: 0 is less than 1"),
    (["--lr", "-1"], "lr -1.0"),
    (["--clip", "-1"], "clip -1.0"),
    (["--alpha", "2", "--offload", "disk"], "alpha 2.0"),
    (["--plan", "p.json", "--offload", "disk"], "--plan has no meaning with --offload disk"),
    (["--offload", "none", "--device", "1GiB"], "--device has no meaning with --offload none; use --offload auto"),
    (["--device", "cpu"], "to train on a device write --on cpu"),
    (["--offload", "host", "--host-budget", "8GiB"], "--host-budget is now --host"),
    (["--disk-dir=/scratch"], "--disk-dir is now --disk"),
    (["--plan", "p.json", "--alpha", "0.5", "--offload", "auto"], "give one of them"),
    (["--documents", "books"], "none of packed, whole"),
    (["--documents", "whole", "--mask-documents"], "a row is of one document"),
    (["--resume"], "--resume needs --checkpoint-dir"),
    (["--checkpoint-every", "5"], "--checkpoint-every needs --checkpoint-dir"),
    (["--no-such-flag"], "unrecognized arguments"),
]


@pytest.mark.parametrize(("flags", "says"), USAGE, ids=[" ".join(flags) for flags, _ in USAGE])
def test_a_usage_error_is_one_line_and_exit_2(
    flags: list[str], says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from memo.cli.main import main

    monkeypatch.chdir(tmp_path)
    code = main(["train", *flags])
    captured = capsys.readouterr()
    assert code == 2
    assert captured.err.count("\n") == 1
    assert says in captured.err
    assert captured.out == ""
    assert list(tmp_path.iterdir()) == []


def test_a_sequence_longer_than_the_data_says_how_long_it_may_be(tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("short")
    result = memo_train(*SMALL, "--data", tmp_path / "short.txt", "--checkpoint-dir", tmp_path / "run")
    assert_one_line(result, code=1, says="longest possible")
    assert [path.name for path in tmp_path.iterdir()] == ["short.txt"]


def test_missing_data_is_named(tmp_path: Path) -> None:
    assert_one_line(memo_train(*SMALL, "--data", tmp_path / "nowhere"), code=1, says="nowhere")


def test_a_scratch_directory_that_does_not_exist_is_named(text: Path, tmp_path: Path) -> None:
    flags = [*SMALL, "--data", text, "--offload", "disk", "--disk", tmp_path / "nowhere"]
    assert_one_line(memo_train(*flags, "--metrics", tmp_path / "m"), code=1, says="nowhere")
    assert list(tmp_path.iterdir()) == []


def test_a_disk_budget_beyond_the_disk_is_refused_at_the_start(text: Path, tmp_path: Path, scratch: Path) -> None:
    flags = [*SMALL, "--data", text, "--offload", "disk", "--disk", scratch, "--disk-budget", "4000TiB"]
    assert_one_line(memo_train(*flags, "--checkpoint-dir", tmp_path / "run"), code=1, says=str(scratch))
    assert not (tmp_path / "run").exists()


def test_outputs_that_cannot_be_written_are_refused_at_the_start(text: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("kept")
    checkpoints = memo_train(*SMALL, "--data", text, "--checkpoint-dir", tmp_path / "file")
    assert_one_line(checkpoints, code=1, says="file")
    metrics = memo_train(*SMALL, "--data", text, "--metrics", tmp_path / "missing" / "m")
    assert_one_line(metrics, code=1, says="missing")
    assert (tmp_path / "file").read_text() == "kept"


def test_checkpoints_of_a_former_run_are_not_mixed_into_a_new_one(text: Path, tmp_path: Path) -> None:
    flags = [*SMALL, "--data", text, "--steps", 1, "--checkpoint-dir", tmp_path / "run"]
    assert memo_train(*flags).returncode == 0
    assert_one_line(memo_train(*flags), code=2, says="--resume")
    early = tmp_path / "run" / "step-00000001"
    early.rename(tmp_path / "early")
    assert memo_train(*flags, "--steps", 2).returncode == 0
    older = memo_train(*flags, "--steps", 3, "--resume", tmp_path / "early")
    assert_one_line(older, code=2, says="step-00000002 is newer")
    other = memo_train(*flags, "--resume", "--layers", 3)
    assert_one_line(other, code=1, says="layers 2 there, 3 here")


def test_a_diverging_run_stops_in_one_line(text: Path, tmp_path: Path) -> None:
    result = memo_train(*SMALL, "--data", text, "--steps", 50, "--lr", "1e30", "--clip", 0, "--warmup", 0)
    assert_one_line(result, code=1, says="use a lower --lr")
