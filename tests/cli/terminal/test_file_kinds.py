"""A file of the wrong kind is refused by every command, in words that say what it is and what reads it."""

from __future__ import annotations

import gzip
import json
import pickle
from pathlib import Path

import pytest

from memo.cli.main import main
from memo.cli.terminal.file_kinds import FileKind, kind_of, require_kind
from memo.errors import ExitCode, MemoError

TRACE = {"format": "memo-trace", "version": 1, "rank": 0, "world_size": 1, "origin_unix_ns": 5, "meta": {}}
CSV = "id,lower,upper,size\na,0,2,8\nb,1,3,8\n"
PLAN = ["plan", "--model", "tiny", "--seq", "8k", "--gpu", "a800"]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file of each kind, named after it."""
    here = tmp_path_factory.mktemp("kinds")
    (here / "trace.jsonl").write_text(json.dumps(TRACE) + "\n")
    (here / "trace.jsonl.gz").write_bytes(gzip.compress((json.dumps(TRACE) + "\n").encode()))
    (here / "buffers.csv").write_text(CSV)
    (here / "snapshot.pickle").write_bytes(pickle.dumps({"segments": [], "device_traces": []}, protocol=4))
    (here / "weights.pt").write_bytes(b"PK\x03\x04" + bytes(100))
    (here / "program").write_bytes(b"\x7fELF\x02\x01\x01" + bytes(100))
    (here / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n")
    (here / "page.html").write_text("<!doctype html>\n<title>t</title>")
    (here / "perfetto.json").write_text('{"displayTimeUnit":"ms","traceEvents":[]}')
    (here / "metrics.jsonl").write_text('{"step": 1, "loss": 5.5}\n')
    (here / "config.json").write_text('{"architectures": ["LlamaForCausalLM"], "model_type": "llama"}')
    (here / "doctor.json").write_text('{\n  "gpu_driver_version": null,\n  "gpus": []\n}')
    (here / "profile.json").write_text('{\n"format": "memo-profile",\n"version": 4\n}')
    (here / "machine.json").write_text('{\n"format": "memo-hardware",\n"version": 1\n}')
    (here / "empty").write_text("\n")
    (here / "folder").mkdir()
    (here / "step-00000002").mkdir()
    (here / "step-00000002" / "meta.json").write_text('{"format": "memo-checkpoint"}')
    assert main([*PLAN, "-o", str(here / "plan.json")]) == ExitCode.OK
    assert main(["pack", str(here / "buffers.csv"), "-o", str(here / "addresses.json")]) == ExitCode.OK
    return here


KINDS = {
    "trace.jsonl": FileKind.TRACE,
    "trace.jsonl.gz": FileKind.TRACE,
    "snapshot.pickle": FileKind.SNAPSHOT,
    "profile.json": FileKind.PROFILE,
    "machine.json": FileKind.HARDWARE,
    "plan.json": FileKind.ACTIVATION_PLAN,
    "addresses.json": FileKind.ADDRESS_PLAN,
}
OTHERS = (
    "weights.pt",
    "program",
    "picture.png",
    "page.html",
    "perfetto.json",
    "metrics.jsonl",
    "config.json",
    "empty",
    "folder",
    "step-00000002",
)
READERS = {
    "check": (["check"], {"plan.json", "addresses.json"}),
    "show": (["show"], {"plan.json", "addresses.json"}),
    "simulate": (["simulate"], {"plan.json"}),
    "simulate-profile": (["simulate", "plan.json", "--profile"], {"profile.json"}),
    "simulate-hardware": (["simulate", "plan.json", "--hardware"], {"machine.json"}),
    "pack": (["pack"], {"buffers.csv", "addresses.json", "snapshot.pickle"}),
    "stats": (["trace", "stats"], {"trace.jsonl", "trace.jsonl.gz"}),
    "html": (["trace", "html", "-o", "out.html"], {"trace.jsonl", "trace.jsonl.gz"}),
    "chrome": (["trace", "chrome", "-o", "out.json"], {"trace.jsonl", "trace.jsonl.gz"}),
    "diff": (["trace", "diff", "trace.jsonl"], {"trace.jsonl", "trace.jsonl.gz"}),
    "plan-profile": (["plan", "--gpu", "a800", "--profile"], {"profile.json"}),
    "plan-doctor": ([*PLAN, "--doctor"], {"doctor.json"}),
    "train-plan": (["train", "--offload", "auto", "--plan"], {"plan.json"}),
}


@pytest.mark.parametrize(("name", "kind"), KINDS.items(), ids=KINDS)
def test_each_kind_is_known_by_its_first_bytes(name: str, kind: FileKind, files: Path) -> None:
    assert kind_of(files / name) is kind


@pytest.mark.parametrize(("command", "fitting"), READERS.values(), ids=READERS)
def test_every_reader_says_what_a_wrong_file_is(
    command: list[str],
    fitting: set[str],
    files: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(files)
    for name, kind in KINDS.items():
        if name in fitting:
            continue
        given = f"./{name}" if "--hardware" in command else name  # a bare name is a preset's
        assert main([*command, given]) == ExitCode.FAILURE, name
        assert f"{given} is {kind.words}" in capsys.readouterr().err
    assert not list(files.glob("out.*"))


@pytest.mark.parametrize("command", [command for command, _ in READERS.values()], ids=READERS)
def test_every_reader_refuses_a_file_that_is_none_of_memos_in_one_line(
    command: list[str], files: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(files)
    for name in OTHERS:
        given = f"./{name}" if "--hardware" in command else name
        assert main([*command, given]) == ExitCode.FAILURE, name
        error = capsys.readouterr().err
        assert name in error
        assert error.count("\n") == 1
    assert not list(files.glob("out.*"))


def test_the_message_names_the_command_that_reads_the_file(files: Path) -> None:
    with pytest.raises(MemoError, match=r"trace\.jsonl is a trace, not an activation plan; use memo trace html$"):
        require_kind(files / "trace.jsonl", FileKind.ACTIVATION_PLAN)


def test_what_is_not_known_is_left_to_the_reader(tmp_path: Path) -> None:
    (tmp_path / "torn.json").write_text('{"format": "memo-act')
    for name in ("torn.json", "absent", "-", "."):
        require_kind(tmp_path / name if name != "-" else name, FileKind.ACTIVATION_PLAN)
    assert kind_of("/dev/null") is None
