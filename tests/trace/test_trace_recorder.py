"""Files of traces: ranks that are given the same name never write the same file."""

from __future__ import annotations

from pathlib import Path

import pytest

from memo.trace import TraceRecorder
from memo.trace.reader import read_trace


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("", ["trace.rank0.jsonl", "trace.rank1.jsonl"]),
        ("trace.rank0.jsonl", ["trace.rank0.jsonl", "trace.rank1.jsonl"]),
        ("step.jsonl", ["step.jsonl", "step.rank1.jsonl"]),
        ("step", ["step", "step.rank1"]),
    ],
    ids=["directory", "default", "named", "bare"],
)
def test_each_rank_has_a_file_of_its_own(tmp_path: Path, name: str, files: list[str]) -> None:
    for rank in range(2):
        TraceRecorder.beside(tmp_path / name, rank=rank, world_size=2, meta={}).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(files)
    traces = [read_trace(tmp_path / file) for file in files]
    assert [(trace.rank, trace.world_size) for trace in traces] == [(0, 2), (1, 2)]
