"""`memo trace` as a person meets it: files, exit codes, one-line errors, and a terminal that no name can command."""

from __future__ import annotations

import gzip
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from memo.cli.main import main
from memo.errors import ExitCode

ROOT = Path(__file__).parent.parent.parent
HEADER = {"format": "memo-trace", "version": 1, "rank": 0, "world_size": 1, "origin_unix_ns": 5, "meta": {}}


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Two ranks of an imagined run."""
    spec = importlib.util.spec_from_file_location("synthetic_trace", ROOT / "benchmarks" / "synthetic_trace.py")
    assert spec is not None
    assert spec.loader is not None
    synthetic = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = synthetic
    spec.loader.exec_module(synthetic)
    folder = tmp_path_factory.mktemp("traces")
    paths = [folder / f"trace.rank{rank}.jsonl" for rank in range(2)]
    for rank, path in enumerate(paths):
        synthetic.write(path, synthetic.Workload(layers=5, steps=3, late_layer=2), rank=rank, world_size=2)
    return [str(path) for path in paths]


def trace_of(path: Path, *lines: dict[str, object]) -> str:
    path.write_text("".join(json.dumps(line) + "\n" for line in (HEADER, *lines)))
    return str(path)


def test_stats_says_the_verdict_and_then_the_figures(traces: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "stats", *traces]) == ExitCode.OK
    out = capsys.readouterr().out
    assert out.startswith("Step ")
    for word in (
        "copies hidden",
        "prefetch hits",
        "nvme-write",
        "of link",
        "budget",
        "reload",
        "worst layers",
        "layers.2",
    ):
        assert word in out


def test_stats_json_is_one_object_with_every_rank_and_step(
    traces: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", "stats", "--json", *traces]) == ExitCode.OK
    found = json.loads(capsys.readouterr().out)
    assert (found["format"], found["version"]) == ("memo-trace-stats", 1)
    assert [rank["rank"] for rank in found["ranks"]] == [0, 1]
    assert [step["step"] for step in found["ranks"][0]["steps"]] == [0, 1, 2]
    assert found["ranks"][0]["steps"][1]["verdict"][0]["rule"] == "step-time"


def test_stats_shows_the_rank_and_step_asked_for(traces: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "stats", *traces, "--rank", "1", "--step", "2"]) == ExitCode.OK
    assert "rank 1 of 2, step 2" in capsys.readouterr().out
    assert main(["trace", "stats", *traces, "--step", "all"]) == ExitCode.OK
    assert "all 3 steps" in capsys.readouterr().out


@pytest.mark.parametrize("choice", [["--rank", "7"], ["--step", "9"], ["--step", "x"]])
def test_a_rank_or_step_that_is_not_there_is_a_usage_error(
    choice: list[str], traces: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", "stats", *traces, *choice]) == ExitCode.USAGE
    assert capsys.readouterr().err.count("\n") == 1


def test_steps_limits_what_is_read(traces: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "stats", "--json", "--steps", "1-2", *traces]) == ExitCode.OK
    found = json.loads(capsys.readouterr().out)
    assert [step["step"] for step in found["ranks"][0]["steps"]] == [1, 2]


@pytest.mark.parametrize("steps", ["x", "3-", "5-2", "-1", "77", "\u0663"])
def test_steps_that_are_none_or_not_there_are_a_usage_error(
    steps: str, traces: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", "stats", f"--steps={steps}", *traces]) == ExitCode.USAGE
    assert capsys.readouterr().err.count("\n") == 1


def test_html_writes_one_page_and_says_its_size(
    traces: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "report.html"
    assert main(["trace", "html", *traces, "-o", str(page)]) == ExitCode.OK
    assert f"Wrote {page}" in capsys.readouterr().out
    assert page.read_text().startswith("<!doctype html>")
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


@pytest.mark.parametrize("what", ["html", "chrome"])
def test_nothing_is_written_over_without_force(
    what: str, traces: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / f"old.{'json' if what == 'chrome' else what}"
    target.write_text("mine")
    assert main(["trace", what, *traces, "-o", str(target)]) == ExitCode.FAILURE
    assert "give -f" in capsys.readouterr().err
    assert target.read_text() == "mine"
    assert main(["trace", what, *traces, "-o", str(target), "--force"]) == ExitCode.OK
    assert target.read_bytes() != b"mine"


def test_a_place_that_cannot_be_written_is_one_line_and_leaves_nothing(
    traces: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", "html", *traces, "-o", str(tmp_path / "absent" / "r.html")]) == ExitCode.FAILURE
    assert capsys.readouterr().err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_chrome_packs_when_the_name_says_so(traces: list[str], tmp_path: Path) -> None:
    plain, packed = tmp_path / "t.json", tmp_path / "t.json.gz"
    for target in (plain, packed):
        assert main(["trace", "chrome", *traces, "-o", str(target)]) == ExitCode.OK
    assert gzip.decompress(packed.read_bytes()) == plain.read_bytes()
    assert json.loads(plain.read_text())["displayTimeUnit"] == "ms"


def test_what_is_no_subcommand_is_told_what_there_is(traces: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "trace.jsonl"]) == ExitCode.USAGE
    assert capsys.readouterr().err == (
        "memo trace: 'trace.jsonl' is none of stats, html, diff, chrome; give one of them (see memo trace --help)\n"
    )
    assert main(["trace", "png", *traces, "-o", "step.png"]) == ExitCode.USAGE
    assert (
        capsys.readouterr().err == "memo trace: 'png' is now html, whose page has the picture (see memo trace --help)\n"
    )


def test_the_same_trace_gives_the_same_page(traces: list[str], tmp_path: Path) -> None:
    for what in ("html", "chrome"):
        first, second = tmp_path / f"a.{what}", tmp_path / f"b.{what}"
        for target in (first, second):
            assert main(["trace", what, *traces, "-o", str(target)]) == ExitCode.OK
        assert first.read_bytes() == second.read_bytes(), what


def test_diff_shows_both_runs_and_the_change(traces: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "diff", *traces]) == ExitCode.OK
    out = capsys.readouterr().out
    assert "d2h rate" in out
    assert "change" in out
    assert main(["trace", "diff", "--json", *traces]) == ExitCode.OK
    figures = json.loads(capsys.readouterr().out)["figures"]
    assert figures["step"]["unit"] == "ns"
    assert figures["step"]["change_percent"] == pytest.approx(100 * (figures["step"]["b"] / figures["step"]["a"] - 1))


def test_a_run_compared_with_itself_has_not_changed(traces: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "diff", "--json", traces[0], traces[0]]) == ExitCode.OK
    figures = json.loads(capsys.readouterr().out)["figures"]
    assert {figure["word"] for figure in figures.values()} == {""}


@pytest.mark.parametrize("command", [["stats"], ["html", "-o", "x.html"], ["chrome", "-o", "x.json"]])
def test_a_bad_trace_is_one_line_and_exit_code_one(
    command: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.jsonl").write_text('{"format": "memo-plan"}\n')
    assert main(["trace", command[0], "bad.jsonl", *command[1:]]) == ExitCode.FAILURE
    error = capsys.readouterr().err
    assert error.startswith(f"memo trace {command[0]}: bad.jsonl, line 1: ")
    assert error.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["bad.jsonl"]


def test_a_narrow_terminal_cuts_no_number(
    traces: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", "stats", *traces]) == ExitCode.OK
    wide = capsys.readouterr().out
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(["trace", "stats", *traces]) == ExitCode.OK
    assert re.sub(r"\x1b\[[0-9]*m", "", capsys.readouterr().out) == wide


def test_a_file_of_another_kind_is_told_what_a_trace_begins_with(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    path.write_text('{\n"kind": "my-own-plan"\n}\n')
    assert main(["trace", "stats", str(path)]) == ExitCode.FAILURE
    assert "line 1: not JSON" in (error := capsys.readouterr().err)
    assert "a trace begins with a header, as `memo train --trace`" in error


@pytest.mark.parametrize("arguments", [[], ["nothing"], ["stats"], ["html", "x"], ["diff", "a"]])
def test_a_wrong_command_line_is_a_usage_error(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", *arguments]) == ExitCode.USAGE
    assert capsys.readouterr().err.count("\n") == 1


HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202e[bold red][/bold]\r\nlayers.1"


def test_no_name_reaches_the_terminal_as_a_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = trace_of(
        tmp_path / "t.jsonl",
        {"k": "step", "t": 0, "step": 0, "phase": "begin"},
        {"k": "state", "t": 1, "step": 0, "id": 1, "to": "live", "nbytes": 9, "module": HOSTILE},
        {"k": "stall", "t": 2, "d": 900_000, "step": 0, "cause": "disk-queue", "module": HOSTILE},
        {"k": "step", "t": 10_000_000, "step": 0, "phase": "end"},
    )
    assert main(["trace", "stats", path]) == ExitCode.OK
    assert main(["trace", "diff", path, path]) == ExitCode.OK
    out = capsys.readouterr().out
    assert not set(out) & set("\x1b\x07\x9b\u202e\r")
    assert "[bold red]" in out  # shown, not obeyed
    assert "\\x1b" in out


def test_the_viewer_needs_no_torch(traces: list[str], tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['torch'] = None\n"
        "from memo.cli.main import main\n"
        f"assert main(['trace', 'html', {traces[0]!r}, '-o', {str(tmp_path / 'r.html')!r}]) == 0\n"
        f"assert main(['trace', 'stats', {traces[0]!r}]) == 0\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, timeout=60)
