"""`memo explain-oom` on traces, on snapshots, and on files that are neither."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from memo.cli.main import main
from memo.errors import ExitCode
from memo.out_of_memory import snapshot

SNAPSHOT = {
    "segments": [
        {
            "device": 0,
            "address": 0,
            "total_size": 2048,
            "blocks": [
                {
                    "address": 0,
                    "size": 1024,
                    "state": "active_allocated",
                    "frames": [{"name": "forward", "filename": "m.py"}],
                }
            ],
        }
    ],
    "device_traces": [],
}
TRACE = """{"format":"memo-trace","version":1,"rank":0,"world_size":1,"origin_unix_ns":0,"meta":{}}
{"k":"step","t":0,"step":4,"phase":"begin"}
{"k":"owned","t":0,"step":4,"owner":"weights","nbytes":2048}
{"k":"counter","t":1,"step":4,"tier":"device","nbytes":3072}
{"k":"step","t":2,"step":4,"phase":"end"}
{"k":"end","t":3,"events":4,"dropped":0}
"""


def test_a_trace_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(TRACE)
    assert main(["explain-oom", str(path)]) == ExitCode.OK
    lines = capsys.readouterr().out.splitlines()
    assert (
        lines[0]
        == "Memory did not run out here. At the peak, in step 4, the device held 3 KiB: weights 2 KiB, other 1 KiB."
    )
    assert [line.split()[:3] for line in lines[5:]] == [["2", "KiB", "weights"], ["1", "KiB", "other"]]


def test_json_of_a_snapshot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "s.pickle"
    path.write_bytes(pickle.dumps(SNAPSHOT))
    assert main(["explain-oom", str(path), "--json"]) == ExitCode.OK
    found = json.loads(capsys.readouterr().out)
    assert (found["format"], found["version"], found["cause"]) == ("memo-explain-oom", 1, "activations")
    assert (found["held_nbytes"], found["reserved_nbytes"]) == (1024, 2048)
    assert len(found["sentences"]) == 3


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"format": "memo-activation-plan", "version": 1}', "is an activation plan, not a trace or"),
        ('{"format": "memo-address-plan", "version": 1}', "is an address plan, not a trace or"),
        ('{"format": "memo-profile", "version": 1}', "is a profile of a step, not a trace or"),
    ],
)
def test_another_file_of_memos_is_recognised(
    content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.json"
    path.write_text(content)
    assert main(["explain-oom", str(path)]) == ExitCode.FAILURE
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x04})" + b"\x85" * 1_000_000 + b"K\x01s.",  # hashing it overflows the stack
        b"\x80\x04})" + b"2\x86" * 60 + b"K\x01s.",  # hashing it takes 2^60 steps
    ],
    ids=["nested", "shared"],
)
def test_a_file_that_would_end_or_stop_the_interpreter_is_refused(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(snapshot, "_LEAST_S", 1)
    path = tmp_path / "x.pickle"
    path.write_bytes(content)
    assert main(["explain-oom", str(path)]) == ExitCode.FAILURE
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "is no snapshot of torch's memory" in said


@pytest.mark.parametrize("size", [-50, float("nan"), 1 << 70, "much"])
def test_sizes_that_are_none_are_damage(size: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    block = {"address": 1 << 20, "size": size, "state": "active_allocated", "frames": []}
    path = tmp_path / "x.pickle"
    path.write_bytes(pickle.dumps({"segments": [{"address": 1 << 20, "total_size": 2048, "blocks": [block]}]}))
    assert main(["explain-oom", str(path)]) == ExitCode.FAILURE
    assert "the snapshot is damaged" in capsys.readouterr().err


def test_an_empty_snapshot_says_how_to_record_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.pickle"
    path.write_bytes(pickle.dumps({"segments": []}))
    assert main(["explain-oom", str(path)]) == ExitCode.FAILURE
    assert "_record_memory_history" in capsys.readouterr().err


def test_a_missing_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain-oom", str(tmp_path / "none")]) == ExitCode.FAILURE
    said = capsys.readouterr().err
    assert "none" in said
    assert "No such file" in said
