"""Reading a trace while it is written: pieces of lines, the newest steps, another run's file, damage."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest

from memo.errors import TraceError
from memo.trace.live import Follower
from memo.trace.reader import TraceLimits, read_trace


@pytest.fixture
def lines(synthetic: ModuleType, tmp_path: Path) -> list[bytes]:
    """A finished trace of six steps."""
    path = tmp_path / "whole.jsonl"
    synthetic.write(path, synthetic.Workload(layers=3, tensors=2, steps=6))
    return path.read_bytes().splitlines(keepends=True)


def test_every_split_of_the_file_gives_the_same_steps(lines: list[bytes], tmp_path: Path) -> None:
    path, whole = tmp_path / "t.jsonl", b"".join(lines)
    path.write_bytes(b"")
    follower = Follower(path, keep=6)
    assert follower.trace() is None
    for begin in range(0, len(whole), 997):
        with path.open("ab") as file:
            file.write(whole[begin : begin + 997])
        follower.update()
    found, expected = follower.trace(), read_trace(path)
    assert found is not None
    assert follower.ended
    assert follower.done == 6
    assert {event.step for event in found.events} == {event.step for event in expected.events}
    assert sorted(map(repr, found.events)) == sorted(map(repr, expected.events))
    assert found.meta == expected.meta


def test_only_the_newest_complete_steps_are_kept(lines: list[bytes], tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    follower, seen = Follower(path, keep=2), []
    follower.update()  # not there yet
    for line in lines[:-1]:
        with path.open("ab") as file:
            file.write(line)
        follower.update()
        trace = follower.trace()
        if trace is not None:
            seen.append(tuple(sorted({event.step for event in trace.events})))
    assert max(map(len, seen)) == 2
    assert list(dict.fromkeys(seen))[-1] == (seen[-1][0], seen[-1][0] + 1)
    assert not follower.ended
    assert sum(map(len, follower._steps.values())) < len(lines) / 2


def test_another_run_in_the_files_place_begins_anew(lines: list[bytes], tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b"".join(lines))
    follower = Follower(path)
    follower.update()
    assert follower.ended
    path.write_bytes(lines[0])  # truncated and begun again, as a new run does
    follower.update()
    assert (follower.ended, follower.done, follower.trace()) == (False, 0, None)
    path.unlink()
    follower.update()
    assert follower.trace() is None


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (b'{"k":"spam"}\n', "line 2"),
        (b"\xff\xfe\n", "line 2: not UTF-8"),
        (b"x" * 70_000, "line 2: longer than 65536 bytes"),
    ],
)
def test_damage_is_named_by_its_line(lines: list[bytes], tmp_path: Path, damage: bytes, says: str) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(lines[0] + damage)
    follower = Follower(path)
    for _ in range(2):  # what follows the damage is not read as if nothing had been
        with pytest.raises(TraceError, match=says):
            follower.update()
    path.write_bytes(lines[0])
    follower.update()


def test_a_file_that_is_no_trace_says_so(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text(json.dumps({"format": "memo-plan"}) + "\n")
    with pytest.raises(TraceError, match="line 1: is not a memo-trace file"):
        Follower(path).update()


def test_steps_of_too_many_events_are_dropped_oldest_first(lines: list[bytes], tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_bytes(b"".join(lines))
    a_step = (len(lines) - 2) // 6
    follower = Follower(path, keep=6, limits=TraceLimits(events=2 * a_step + a_step // 2))
    follower.update()
    trace = follower.trace()
    assert trace is not None
    assert len({event.step for event in trace.events}) <= 2
