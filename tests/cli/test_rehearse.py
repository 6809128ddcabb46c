"""`memo rehearse`: its lines, its JSON, its trace, and its exit codes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from memo.cli.main import main
from memo.cli.tables.rehearsal import settled_line, step_line, what_would_fit
from memo.errors import ExitCode
from memo.events import TierName
from memo.mip.activation.files import hardware_to_json
from memo.mip.inputs import hardware_preset
from memo.rehearsal import Rehearsal, RehearsedStep

GIB = 1 << 30
SMALL = {
    "model_type": "llama",
    "hidden_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "intermediate_size": 2048,
    "vocab_size": 1024,
}
USER_STEP = """
import torch

def build(*, batch, tokens):
    layer = torch.nn.TransformerEncoderLayer(64, 2, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 3)
    x = torch.zeros(batch, tokens, 64)
    return model, lambda: model(x).sum()

def reads(*, batch, tokens):
    model, step = build(batch=batch, tokens=tokens)
    def loss():
        found = step()
        return found if found.item() > 0 else -found
    return model, loss
"""


@pytest.fixture
def config(tmp_path: Path) -> str:
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(SMALL))
    return str(path)


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "rehearsed_step.py").write_text(USER_STEP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "rehearsed_step", raising=False)
    return "rehearsed_step"


def rehearsed(config: str, *more: str) -> list[str]:
    return ["rehearse", "--model", config, "--seq", "8k", "--gpu", "rtx4090", "--loss-without-logits", *more]


def test_steps_the_report_and_when_it_settled_are_printed(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(rehearsed(config, "--device", "700MiB")) == ExitCode.OK
    said = capsys.readouterr()
    lines = said.out.splitlines()
    steps = [line for line in lines if line.startswith("step ")]
    assert [line.split()[1] for line in steps] == [str(number) for number in range(len(steps))]
    assert all(" of 700 MiB" in line for line in steps)
    assert "trials" in steps[0]
    assert steps[-1].endswith("settled")
    assert any(line.startswith("time: ") for line in lines)
    assert lines[-1].startswith("settled after ")
    assert lines[-1].endswith("plain steps beyond their own")
    assert said.err == ""


def test_json_has_units_in_its_keys(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(rehearsed(config, "--way", "keep", "--steps", "2", "--json")) == ExitCode.OK
    found = json.loads(capsys.readouterr().out)
    assert found["fits"]
    assert found["settled_after_steps"] == 0
    assert found["gpu"] == "rtx4090"
    assert len(found["steps"]) == 2
    assert found["steps"][1]["seconds_s"] == found["step_s"]
    assert found["steps"][1]["device_peak_nbytes"] <= found["device_budget_nbytes"]


def test_a_trace_is_written_and_every_trace_command_reads_it(
    config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, page = str(tmp_path / "trace.jsonl"), str(tmp_path / "step.html")
    given = rehearsed(config, "--alpha", "1", "--steps", "2", "--trace", trace)
    assert main(given) == ExitCode.OK
    assert f"Wrote {trace}" in capsys.readouterr().out
    assert main(given) == ExitCode.FAILURE
    assert "exists" in capsys.readouterr().err
    assert main([*given, "-f"]) == ExitCode.OK
    assert main(["trace", "stats", trace, "--json"]) == ExitCode.OK
    capsys.readouterr()
    assert main(["trace", "stats", trace]) == ExitCode.OK
    assert "25 GB/s  25 GB/s    100 %" in capsys.readouterr().out  # the link of the simulated GPU
    assert main(["trace", "diff", trace, trace]) == ExitCode.OK
    assert main(["trace", "html", trace, "-o", page]) == ExitCode.OK
    assert Path(page).stat().st_size > 100_000


def test_a_budget_that_is_exceeded_is_exit_code_3_with_tier_step_and_bytes(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(rehearsed(config, "--device", "250MiB", "--steps", "1", "--alpha", "0")) == ExitCode.INFEASIBLE
    said = capsys.readouterr()
    assert said.err.startswith("memo rehearse: step 0 took ")
    assert " of 250 MiB of device" in said.err
    assert "needs --device " in said.err
    assert said.err.count("\n") == 1
    assert (
        main(rehearsed(config, "--device", "250MiB", "--steps", "1", "--alpha", "0", "--json")) == ExitCode.INFEASIBLE
    )
    found = json.loads(capsys.readouterr().out)
    assert not found["fits"]
    assert found["violations"][0]["tier"] == "device"
    assert found["violations"][0]["budget_nbytes"] == 250 << 20


def test_a_budget_in_which_no_plan_can_fit_is_said_before_the_first_backward(
    config: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(rehearsed(config, "--device", "250MiB")) == ExitCode.INFEASIBLE
    said = capsys.readouterr()
    assert "no plan fits: " in said.err
    assert "it takes more than " in said.err
    assert said.err.count("\n") == 1


def test_a_full_host_tier_is_exit_code_3(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(rehearsed(config, "--host", "64MiB", "--alpha", "1")) == ExitCode.INFEASIBLE
    assert "step 0 does not fit: no room for " in capsys.readouterr().err
    disk = ["--disk-space", "1GiB", "--disk-budget", "900MiB", "--disk-write", "20GB", "--disk-read", "20GB"]
    assert main(rehearsed(config, "--host", "64MiB", "--alpha", "1", "--steps", "1", *disk)) == ExitCode.OK
    assert "  disk peak " in capsys.readouterr().out


def test_a_model_that_does_not_fit_is_exit_code_3(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    assert main(["rehearse", "--model", "meta-llama/Meta-Llama-3-8B", "--gpu", "rtx4090"]) == ExitCode.INFEASIBLE
    assert "the model and its optimizer do not fit: " in capsys.readouterr().err


def test_a_gpt_preset_has_several_lengths(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rehearse", "--model", "tiny", "--layers", "2", "--lengths", "128,256"]) == ExitCode.OK
    out = capsys.readouterr().out
    assert "128 tokens" in out
    assert " at 128, " in out.splitlines()[-1]


def test_a_model_of_the_users_own(user_module: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["rehearse", "--model", f"{user_module}:build", "--seq", "64", "--steps", "1"]
    assert main([*given, "--optimizer", "none", "--accumulate", "2", "--attach"]) == ExitCode.OK
    assert "step  0" in capsys.readouterr().out
    read = [*given, "--model", f"{user_module}:reads"]
    assert main(read) == ExitCode.FAILURE
    said = capsys.readouterr().err
    assert "--assume 1" in said
    assert said.count("\n") == 1
    assert main([*read, "--assume", "1"]) == ExitCode.OK


def test_a_gpu_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "gpu.json"
    path.write_text(hardware_to_json(hardware_preset("rtx4090")))
    given = ["rehearse", "--model", "tiny", "--layers", "2", "--steps", "1", "--seq", "128", "--gpu", str(path)]
    assert main(given) == ExitCode.OK
    assert " of 21.79 GiB" in capsys.readouterr().out  # 94 % of 24 GiB less the firmware's


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gpu", "h900"], "unknown GPU 'h900'"),
        (["--model", "nobody"], "unknown model 'nobody'"),
        (["--model", "nobody/there"], "no such file or folder"),
        (["--model", "nobody:there"], "nobody"),
        (
            ["--model", "tiny", "--lora", "4"],
            "--lora does not go with tiny, memo's GPT, which PEFT does not adapt; name a published model",
        ),
        (["--lora", "0"], "--lora: 0 is less than 1"),
        (["--layers", "0"], "--layers: 0 is less than 1"),
        (["--batch", "0"], "--batch: 0 is less than 1"),
        (["--steps", "0"], "--steps: 0 is less than 1"),
        (["--alpha", "2"], "--alpha: 2.0 is not between 0"),
        (["--alpha", "1", "--way", "keep"], "--alpha applies to --way memo"),
        (["--device", "200GiB"], "--device: 200 GiB are not within the 80 GiB of h100"),
        (["--device", "8"], "can be read in several ways"),
        (["--host", "0"], "nowhere to move activations"),
        (["--disk-write", "5GB"], "needs a disk"),
        (["--disk-space", "1TiB", "--disk-budget", "2TiB"], "--disk-budget is more than the 1 TiB of --disk-space"),
        (["--seq", "8k", "--lengths", "8k"], "--lengths: not allowed with argument --seq"),
        (["--lengths", "8k,none"], "cannot read 'none'"),
        (["--assume", "nan"], "not a finite number"),
        (["--optimizer", "nobody", "--model", "tiny"], "nobody"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("transformers")
    assert main(["rehearse", "--model", "llama-3-8b", *arguments]) == ExitCode.USAGE
    said = capsys.readouterr()
    assert words in said.err
    assert said.err.count("\n") == 1
    assert said.out == ""


def test_a_users_step_without_tokens_has_one_length(user_module: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rehearse", "--model", f"{user_module}:build", "--lengths", "8,16"]) == ExitCode.USAGE
    assert "--lengths applies to models by name or configuration" in capsys.readouterr().err


def test_a_configuration_that_cannot_be_built_is_one_line(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path(config).write_text(json.dumps(SMALL | {"num_attention_heads": 7}))
    assert main(rehearsed(config)) == ExitCode.USAGE
    said = capsys.readouterr().err
    assert "not a multiple of the number of attention heads" in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    ("package", "more", "words"),
    [
        ("transformers", [], 'needs transformers: pip install "transformers>=5"'),
        ("peft", ["--lora", "4"], 'adapters need PEFT: pip install "peft>=0.17"'),
    ],
)
def test_a_package_that_is_missing_is_one_line(
    package: str,
    more: list[str],
    words: str,
    config: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    assert main(rehearsed(config, *more)) == ExitCode.USAGE
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1


def test_a_long_rehearsal_says_about_how_long(config: str, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["rehearse", "--model", "tiny", "--layers", "2", "--seq", "128", "--way", "keep", "--steps", "1"]
    assert main([*given, "--accumulate", "240"]) == ExitCode.OK
    assert "memo rehearse: 2 layers, about 30 s of CPU time\n" in capsys.readouterr().err
    assert main(given) == ExitCode.OK
    assert capsys.readouterr().err == ""


def test_its_help_needs_no_torch() -> None:
    code = "import sys\nfrom memo.cli.main import main\nmain(['rehearse', '--help'])\nassert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd="/")
    assert "gemma-2-9b" in done.stdout


def step(number: int, seconds: float = 2.0, **others: object) -> RehearsedStep:
    fields = {
        "number": number,
        "tokens": 0,
        "seconds": seconds,
        "device_bytes": GIB,
        "host_bytes": 0,
        "disk_bytes": 0,
        "moved_bytes": 0,
        "recompute_s": 0.0,
        "stall_s": 0.0,
        "trials": 0,
        "is_settled": number >= 2,
        "decision": "settled: plan",
    }
    return RehearsedStep(**(fields | others))  # type: ignore[arg-type]


def found(*steps: RehearsedStep, **others: object) -> Rehearsal:
    fields = {
        "steps": steps,
        "static_bytes": GIB,
        "device_budget": 2 * GIB,
        "host_budget": GIB,
        "disk_budget": 0,
        "failure": None,
        "has_room": True,
        "settled": True,
        "report": "",
        "warned": (),
        "took_s": 1.0,
    }
    return Rehearsal(**(fields | others))  # type: ignore[arg-type]


def test_the_line_of_a_step_leaves_out_what_is_nothing() -> None:
    plain = step(3)
    assert step_line(plain, 2 * GIB) == "step  3  2.00 s  device peak 1 GiB of 2 GiB  settled: plan"
    assert step_line(plain, 2 * GIB, before="settled: plan").endswith("GiB  settled")
    busy = step(3, tokens=8192, host_bytes=GIB, moved_bytes=GIB, recompute_s=0.5, stall_s=0.25, trials=4)
    assert step_line(busy, 2 * GIB) == (
        "step  3  8k tokens  2.00 s  device peak 1 GiB of 2 GiB  host peak 1 GiB  offloaded 1 GiB  recompute 500 ms  "
        "stall 250 ms  4 trials  settled: plan"
    )


def test_steps_before_the_settled_plan_are_counted_in_steps_by_it() -> None:
    steps = [step(0, 5.0), step(1, 3.0), step(2), step(3)]
    assert settled_line(found(*steps)) == (
        "settled after 2 steps with 2.00 s a step; the first 2 took 2.0 plain steps beyond their own"
    )
    tried_again = [*steps, step(4, 9.0, trials=32)]
    assert found(*tried_again).step_s == 2.0
    assert found(*tried_again).settling_s == 4.0
    assert found(*tried_again, settled=False).step_s == 9.0
    first = [step(0, is_settled=True), step(1, is_settled=True)]
    assert settled_line(found(*first)) == "settled from the first step on with 2.00 s a step"
    assert settled_line(found(*steps[:2], settled=False)) == "not settled after 2 steps"


def test_what_would_fit_names_each_tier() -> None:
    assert what_would_fit(found(step(0)), most_device=3 * GIB) is None
    over = found(step(0, device_bytes=3 * GIB), step(1, host_bytes=2 * GIB))
    assert [one.tier for one in over.violations] == [TierName.DEVICE, TierName.HOST]
    assert what_would_fit(over, most_device=3 * GIB) == (
        "step 0 took 3 GiB of 2 GiB of device; it needs --device 3GiB, or fewer tokens; step 1 took 2 GiB of 1 GiB of "
        "host; it needs --host 2GiB, or fewer tokens"
    )
    assert "a GPU with more memory" in str(what_would_fit(over, most_device=2 * GIB))
    planned = found(
        step(0, decision="settled: no plan fits: the smallest device budget that fits is 4 GiB"), failure="E"
    )
    assert str(what_would_fit(planned, most_device=GIB)).endswith("the smallest device budget that fits is 4 GiB")
