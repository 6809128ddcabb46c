"""`memo explain-oom` on traces, on snapshots, and on files that are neither."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest

from memo.cli.main import main
from memo.errors import ExitCode

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
    assert lines[0] == "At the peak, in step 4, the device held 3 KiB: weights 2 KiB, other 1 KiB."
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
        ('{"format": "memo-activation-plan", "version": 1}', "is an activation plan; use memo show"),
        ('{"format": "memo-profile", "version": 1}', "is a profile; use memo plan"),
    ],
)
def test_another_file_of_memos_is_recognised(
    content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.json"
    path.write_text(content)
    assert main(["explain-oom", str(path)]) == ExitCode.USAGE
    assert message in capsys.readouterr().err


def test_a_missing_file_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["explain-oom", str(tmp_path / "none")]) == ExitCode.FAILURE
    assert "none': No such file" in capsys.readouterr().err
