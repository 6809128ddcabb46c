"""Files that commands write: one rule for what exists, what is no file's name, and how names are told."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from memo.cli.main import main
from memo.errors import ExitCode

ROOT = Path(__file__).parents[3]
STEP = str(ROOT / "tests" / "mip" / "data" / "gptm_L4_ckpt.csv")
TRACE = {"format": "memo-trace", "version": 1, "rank": 0, "world_size": 1, "origin_unix_ns": 5, "meta": {}}
PLAN = ["plan", "--model", "tiny", "--seq", "8k", "--gpu", "a800"]
WRITERS = {
    "pack": ["pack", STEP],
    "plan": PLAN,
    "record": ["record", "--model", "tiny", "--seq", "64"],
    "profile": ["profile", "--model", "tiny", "--seq", "64"],
    "html": ["trace", "html", "trace.jsonl"],
    "chrome": ["trace", "chrome", "trace.jsonl"],
    "simulate": ["simulate", "given.json"],
}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Path:
    """A working directory with a trace, and with a plan for `memo simulate`."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trace.jsonl").write_text(json.dumps(TRACE) + "\n")
    assert main([*PLAN, "-o", "given.json"]) == ExitCode.OK
    capsys.readouterr()
    return tmp_path


@pytest.mark.parametrize("command", WRITERS.values(), ids=WRITERS)
@pytest.mark.parametrize("name", ["", "-"])
def test_an_empty_name_and_a_dash_are_no_files(
    command: list[str], name: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(here.iterdir())
    assert main([*command, "-o", name]) == ExitCode.USAGE
    assert f"{name!r} is not a file name" in capsys.readouterr().err
    assert sorted(here.iterdir()) == before


@pytest.mark.parametrize("command", WRITERS.values(), ids=WRITERS)
def test_what_exists_is_kept_and_refused_in_the_same_words(
    command: list[str], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (here / "mine").write_text("mine")
    assert main([*command, "-o", "mine"]) == ExitCode.FAILURE
    assert capsys.readouterr().err.endswith(": mine exists; give -f to overwrite it\n")
    assert (here / "mine").read_text() == "mine"


@pytest.mark.parametrize("name", [name for name in WRITERS if name != "simulate"])  # which puts a trace into one
def test_a_directory_is_not_overwritten(name: str, here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (here / "folder").mkdir()
    assert main([*WRITERS[name], "-o", "folder", "-f"]) == ExitCode.USAGE
    assert "folder is a directory; name a file" in capsys.readouterr().err
    assert list((here / "folder").iterdir()) == []


@pytest.mark.parametrize("command", [WRITERS["pack"], WRITERS["plan"], WRITERS["html"]], ids=["pack", "plan", "html"])
def test_a_name_that_was_written_is_told_without_its_escapes(
    command: list[str], here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "-o", "\x1b[2J plän \u202e"]) == ExitCode.OK
    out = capsys.readouterr().out
    assert "Wrote \\x1b[2J plän \\u202e" in out
    assert not set(out) & set("\x1b\u202e")


@pytest.mark.parametrize("command", [WRITERS["pack"], WRITERS["html"]], ids=["pack", "html"])
def test_a_file_that_grows_too_large_is_one_line_and_leaves_nothing(command: list[str], here: Path) -> None:
    code = (
        "import resource, sys\n"
        "from memo.cli.main import main\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        f"sys.exit(main({[*command, '-o', 'new']!r}))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == ExitCode.FAILURE
    assert done.stderr.count("\n") == 1
    assert "cannot write" in done.stderr
    assert "File too large" in done.stderr
    assert sorted(path.name for path in here.iterdir()) == ["given.json", "trace.jsonl"]


@pytest.mark.parametrize("command", WRITERS.values(), ids=WRITERS)
@pytest.mark.parametrize(("name", "reason"), [("absent/out", "No such file"), ("trace.jsonl/out", "Not a directory")])
def test_a_directory_that_cannot_hold_the_output_is_refused_before_the_work(
    command: list[str],
    name: str,
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    worked = []
    for module, work in (
        ("pack", "solve"),
        ("record", "_record"),
        ("profile", "Options.builder"),
        ("trace", "read_traces"),
        ("simulate", "simulate"),
    ):
        monkeypatch.setattr(f"memo.cli.{module}.{work}", lambda *_, work=work, **__: worked.append(work))
    monkeypatch.setattr("memo.search.Request.plan", lambda _: worked.append("plan"))
    assert main([*command, "-o", name]) == ExitCode.FAILURE
    assert f"cannot write {name}: {name[:-4]}: {reason}" in capsys.readouterr().err
    assert not worked
