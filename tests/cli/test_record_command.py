"""`memo record`: files, pipes, a user's own step, exit codes."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from memo.allocator import trace_of
from memo.cli.main import main
from memo.errors import ExitCode
from memo.mip.address import read_problem

SMALL = ["record", "--model", "tiny", "--layers", "2", "--seq", "128"]

USER_STEP = """
import torch
from torch import nn

def build(*, batch, tokens):
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    x = torch.randn(batch, tokens, 8)
    return model, lambda: model(x).mean()

def by_contents(*, batch, tokens):
    model, loss = build(batch=batch, tokens=tokens)
    return model, lambda: loss() if loss() > -1 else None

def nothing(*, batch, tokens):
    return None
"""


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "users_step.py").write_text(USER_STEP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.delitem(sys.modules, "users_step", raising=False)
    return "users_step"


@pytest.mark.parametrize("name", ["trace.csv", "trace.json"])
def test_a_trace_is_written_and_packed(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = str(tmp_path / name)
    assert main([*SMALL, "-o", path]) == ExitCode.OK
    assert capsys.readouterr().out.splitlines()[-1] == f"Wrote {path}"
    trace = trace_of(read_problem(path))
    assert main(["pack", path, "--json"]) == ExitCode.OK
    packed = json.loads(capsys.readouterr().out)
    assert packed["arenas"][0]["lower_bound_nbytes"] == trace.peak_nbytes
    assert {use["segments"] for use in packed["caching"]} == {"fixed", "expandable"}
    assert all(use["reserved_nbytes"] >= trace.peak_nbytes for use in packed["caching"])


def test_one_command_pipes_into_the_other() -> None:
    memo = f"{sys.executable} -m memo.cli.main"
    command = f"{memo} {' '.join(SMALL)} --alpha 0.5 | {memo} pack"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    assert "offloaded, alpha 0.5" in done.stderr
    assert "PyTorch, fixed segments" in done.stdout
    assert "PyTorch, expandable segments" in done.stdout
    assert "first fit" in done.stdout or "optimal" in done.stdout


def test_the_table_without_caching_is_for_arenas_that_are_not_the_devices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "p.csv").write_text("id,lower,upper,size,arena\na,0,1,5,host\n")
    assert main(["pack", str(tmp_path / "p.csv")]) == ExitCode.OK
    assert "caching" not in capsys.readouterr().out


def test_pack_without_a_file_or_a_pipe_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr(sys, "stdin", Terminal())
    assert main(["pack"]) == ExitCode.USAGE
    assert "memo record ... | memo pack" in capsys.readouterr().err


def test_json_sums_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--json", "--exact"]) == ExitCode.OK
    summary = json.loads(capsys.readouterr().out)
    unit = 128 * 128 * 2
    assert summary["saved_nbytes"]["input"] == summary["saved_nbytes"]["attention"] == 2 * unit
    assert summary["saved_nbytes"]["recomputable"] == 2 * 14 * unit
    assert summary["layers"] == 2
    assert summary["tokens"] == 128
    assert summary["peak_nbytes"] > 0
    assert main([*SMALL, "--json", "--alpha", "0"]) == ExitCode.OK
    offloaded = json.loads(capsys.readouterr().out)
    assert offloaded["saved_nbytes"] == {}
    assert offloaded["alpha"] == 0


@pytest.mark.parametrize(
    "options",
    [
        ["--checkpoint"],
        ["--optimizer"],
        ["--optimizer", "--alpha", "0.5"],
        ["--real"],
        ["--variant", "llama"],
        ["--batch", "2"],
    ],
)
def test_every_way_of_a_step_is_recorded(options: list[str], tmp_path: Path) -> None:
    plain, other = str(tmp_path / "plain.csv"), str(tmp_path / "other.csv")
    assert main([*SMALL, "-o", plain]) == main([*SMALL, *options, "-o", other]) == ExitCode.OK
    assert (trace_of(read_problem(plain)) == trace_of(read_problem(other))) == (options == ["--real"])


def test_a_sequence_beyond_the_learned_positions_is_recorded(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["record", "--model", "tiny", "--seq", "2k", "--json"]) == ExitCode.OK
    assert json.loads(capsys.readouterr().out)["tokens"] == 2048


def test_a_users_own_step(user_module: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["record", "--model", f"{user_module}:build", "--seq", "1m", "--batch", "4", "--json", "--exact"]
    assert main(command) == ExitCode.OK
    summary = json.loads(capsys.readouterr().out)
    assert summary["peak_nbytes"] > 4 * 2**20 * 8 * 4
    assert summary["static_nbytes"] == (8 * 8 + 8) * 4


def test_a_step_reads_the_assumed_number(user_module: str, capsys: pytest.CaptureFixture[str]) -> None:
    """It reads whether its loss is above -1: if not, with 0, it returns nothing, and no backward runs."""
    allocations = {}
    for number in ("1", "0"):
        command = ["record", "--model", f"{user_module}:by_contents", "--seq", "16", "--json", "--assume", number]
        assert main(command) == ExitCode.OK
        allocations[number] = json.loads(capsys.readouterr().out)["allocations"]
    assert allocations["1"] > allocations["0"] > 0


def test_a_named_optimizers_state_is_static(user_module: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["record", "--model", f"{user_module}:build", "--seq", "16", "--json", "--exact"]
    static = {}
    for spec in ("sgd", "sgd,momentum=0.9", "adam"):
        assert main([*command, "--optimizer", spec]) == ExitCode.OK
        summary = json.loads(capsys.readouterr().out)
        assert summary["optimizer"] == spec
        static[spec] = summary["static_nbytes"]
    parameters = (8 * 8 + 8) * 4
    counters = 2 * 4  # Adam's steps, of two parameters
    assert static == {"sgd": parameters, "sgd,momentum=0.9": 2 * parameters, "adam": 3 * parameters + counters}


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--model", "8b"], ExitCode.USAGE, "unknown model '8b'"),
        (["--model", "no.such:thing"], ExitCode.USAGE, "no.such:thing"),
        (["--model", "users_step:missing"], ExitCode.USAGE, "missing"),
        (["--model", "os:getcwd"], ExitCode.USAGE, "cannot be called with the keywords batch and tokens"),
        (["--model", "users_step:nothing"], ExitCode.FAILURE, "returned NoneType, not (model,"),
        (["--model", "users_step:by_contents"], ExitCode.FAILURE, "needs the contents of a tensor"),
        (["--model", "users_step:build", "--alpha", "0.5"], ExitCode.FAILURE, "no repeated layers"),
        (["--model", "users_step:build", "--layers", "3"], ExitCode.USAGE, "--layers"),
        (["--model", "users_step:build", "--optimizer", "lion"], ExitCode.USAGE, "--optimizer lion: choose one of"),
        (["--model", "users_step:build", "--optimizer", "sgd,fast"], ExitCode.USAGE, "is not name=value"),
        (["--assume", "1", "--real"], ExitCode.USAGE, "not allowed with"),
        (["--seq", "many"], ExitCode.USAGE, "cannot read"),
        (["--batch", "0"], ExitCode.USAGE, "--batch"),
        (["--alpha", "2"], ExitCode.USAGE, "--alpha"),
        (["--alpha", "0.5", "--checkpoint"], ExitCode.USAGE, "not allowed with"),
        (["--alpha", "0.5", "--real"], ExitCode.USAGE, "without bytes"),
    ],
)
def test_what_cannot_be_recorded_is_one_line(
    arguments: list[str], code: ExitCode, words: str, user_module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["record", *arguments]) == code
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


def test_existing_files_are_kept_without_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.csv"
    path.write_text("mine")
    assert main([*SMALL, "-o", str(path)]) == ExitCode.FAILURE
    assert path.read_text() == "mine"
    assert main([*SMALL, "-o", str(path), "-f"]) == ExitCode.OK
    assert trace_of(read_problem(path)).peak_nbytes > 0


def test_seven_billion_parameters_at_a_million_tokens_take_less_than_a_gibibyte() -> None:
    code = (
        "from memo.cli.main import main\nmain(['record', '--model', '7b', '--seq', '1m', '--json'])\n"
        # Not ru_maxrss, which begins with the size of the process that started this one.
        "print(next(line.split()[1] for line in open('/proc/self/status') if line.startswith('VmHWM')))"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    summary, peak_kib = done.stdout.splitlines()
    assert json.loads(summary)["layers"] == 32
    assert int(peak_kib) << 10 < 1 << 30


def test_help_and_pack_need_no_torch() -> None:
    code = (
        "import sys\nfrom memo.cli.main import main\nmain(['record', '--help'])\n"
        "import memo.allocator.trace, memo.allocator.caching_model\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, cwd="/")


def test_a_rank_of_eight_saves_sixteen_gib_a_layer_at_a_million_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    """The paper's 7b: 16 / 8 units of b·s·h; torch's ColwiseParallel on the same layer saves 46 GiB."""
    flags = ["record", "--model", "7b", "--layers", "4", "--seq", "1m", "--tp", "8", "--exact", "--json"]
    assert main(flags) == ExitCode.OK
    summary = json.loads(capsys.readouterr().out)
    saved = summary["saved_nbytes"]
    assert saved["input"] + saved["attention"] + saved["recomputable"] == 4 * 16 << 30
    assert (summary["tp"], summary["sequence_parallel"]) == (8, True)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--tp", "3"], "does not divide the model's 2 heads"),
        (["--tp", "2", "--seq", "129"], "--seq 129 does not divide over 2 ranks"),
        (["--tp", "2", "--real"], "other ranks"),
        (["--tp", "0"], "--tp: 0 is less than 1"),
        (["--tp", "2", "--model", "users_step:build"], "named models"),
    ],
)
def test_a_rank_that_cannot_be_is_one_line(
    flags: list[str], words: str, user_module: str, capsys: pytest.CaptureFixture[str]
) -> None:
    named = flags if "--model" in flags else [*SMALL[1:3], *flags]
    assert main(["record", *named]) == ExitCode.USAGE
    told = capsys.readouterr().err
    assert words in told
    assert told.count("\n") == 1


def test_a_ranks_trace_pipes_into_pack() -> None:
    memo = f"{sys.executable} -m memo.cli.main"
    command = f"{memo} {' '.join(SMALL)} --tp 2 | {memo} pack - --json"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, check=True)
    assert "one rank of tp 2" in done.stderr
    assert json.loads(done.stdout)["arenas"][0]["lower_bound_nbytes"] > 0
