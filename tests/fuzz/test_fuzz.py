"""The fuzzer's readers: inputs that once failed pass, so do some new ones, and the fuzzer finds a fault that is put in."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import resource
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from benchmarks.results import newest_result
from memo.errors import PlanError
from tests.fuzz import __main__ as command, readers
from tests.fuzz.corpus import unpacked
from tests.fuzz.mutations import BYTES, JSON
from tests.fuzz.readers import READERS, Broken, Reader, examine

FOUND = Path(__file__).parent / "found"
KEPT = [path for path in sorted(FOUND.rglob("*")) if path.is_file()]
SOME = 40


def _damaged(data: bytes, most: int, draw: random.Random) -> bytes:
    """Bytes changed, left out or repeated, as libFuzzer would without its corpus."""
    at, count = draw.randrange(len(data) + 1), draw.randrange(1, 9)
    changed = (
        data[:at] + data[at + count :],
        data[:at] + draw.randbytes(count) + data[at:],
        data[:at],
        data + data[:at],
    )
    return draw.choice(changed)[:most]


def _prepared(reader: Reader, folder: Path) -> Sequence[bytes]:
    seeds = list(reader.seeds())
    for seed in seeds:
        for _ in (reader.read, *reader.commands):  # imports, which are no part of what an input costs
            with contextlib.suppress(Broken):
                examine(reader, seed, folder)
    return seeds


@pytest.mark.parametrize("path", KEPT, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_an_input_that_once_failed_passes(path: Path, tmp_path: Path) -> None:
    reader = READERS[path.parent.name]
    _prepared(reader, tmp_path)
    examine(reader, path.read_bytes(), tmp_path)


@pytest.mark.parametrize("name", unpacked())
def test_inputs_that_reached_a_branch_first_still_end_as_they_may(name: str, tmp_path: Path) -> None:
    reader = READERS[name]
    _prepared(reader, tmp_path)
    for data in unpacked()[name]:
        examine(reader, data, tmp_path, commands=False)


@pytest.mark.parametrize("name", READERS)
def test_examples_are_accepted_and_changed_ones_are_accepted_or_refused_in_a_line(name: str, tmp_path: Path) -> None:
    reader, draw = READERS[name], random.Random(name)
    seeds = _prepared(reader, tmp_path)
    assert all(examine(reader, seed, tmp_path) for seed in seeds)
    inputs = list(seeds)
    for number in range(SOME):
        data = draw.choice(inputs)
        data = reader.shape(data, 1 << 16, draw, lambda given, most: _damaged(given, most, draw))
        if examine(reader, data, tmp_path, commands=number % 8 == 0):
            inputs.append(data)


def test_whatever_a_reader_raises_beside_memo_errors_is_told(tmp_path: Path) -> None:
    def read(path: Path) -> object:
        if b"7" in path.read_bytes():
            raise KeyError("x")
        raise PlanError("")

    reader = Reader(name="x", seeds=lambda: [b"1"], shape=JSON, file="x.json", read=read)
    with pytest.raises(KeyError):
        examine(reader, b"7", tmp_path)
    with pytest.raises(Broken, match="without a word"):
        examine(reader, b"1", tmp_path)


def _more_than_ever(path: Path) -> object:
    return len(path.read_bytes() * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10))


def _a_second(path: Path) -> object:
    begun = time.process_time()
    while time.process_time() - begun < 1:
        path.read_bytes()
    return None


@pytest.mark.parametrize(("read", "words"), [(_a_second, "s of processor time"), (_more_than_ever, "MiB more memory")])
def test_time_and_memory_beyond_the_limits_are_told(
    read: Callable[[Path], object], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = {"MOST_S": 0.5, "MOST_BYTES": 1 << 40} if read is _a_second else {"MOST_S": 1e9, "MOST_BYTES": 1 << 25}
    for name, limit in limits.items():
        monkeypatch.setattr(readers, name, limit)
    reader = Reader(name="x", seeds=lambda: [b"1"], shape=JSON, file="x.json", read=read)
    with pytest.raises(Broken, match=words):
        examine(reader, b"1", tmp_path)


def test_a_run_adds_to_the_inputs_of_the_latest_result_file_and_takes_the_fastest_reader_first(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    given: list[tuple[str, int]] = []

    def fuzz(reader: Reader, *, inputs: int, minutes: float, seed: int) -> command.Run:
        given.append((reader.name, inputs))
        finds = ["a-find"] if reader.name == "trace" else []
        return command.Run(
            inputs=min(inputs, 60), seconds={"trace": 6.0}.get(reader.name, 3.0), edges=5, corpus=2, finds=finds
        )

    monkeypatch.setattr(command, "fuzz", fuzz)
    monkeypatch.setenv("OUT", str(tmp_path))
    arguments = ["fuzz", "--write", "--continue", "--readers", "trace cluster"]
    for inputs in ("100", "150"):
        monkeypatch.setattr(sys, "argv", [*arguments, "--inputs", inputs])
        assert command.main() == 1
    assert given == [("trace", 100), ("trace", 40), ("cluster", 100), ("cluster", 40), ("cluster", 50), ("trace", 50)]
    body = newest_result("fuzz")
    assert body is not None
    assert {name: (run["inputs"], run["seconds"]) for name, run in body["readers"].items()} == {
        "cluster": (150, 9.0),
        "trace": (150, 18.0),
    }
    assert body["readers"]["trace"]["finds"] == ["a-find"] * 3
    assert [piece["inputs"] for piece in body["pieces"]] == [
        {"trace": 100, "cluster": 100},
        {"cluster": 50, "trace": 50},
    ]


def _shared(levels: int) -> bytes:
    """A pickle of a tuple that holds another one twice, and so on: hashing it takes 2 to the power of levels."""
    pairs = b"".join(
        b"h" + bytes([level]) + b"h" + bytes([level]) + b"\x86q" + bytes([level + 1]) for level in range(levels)
    )
    return b"\x80\x04)q\x00" + pairs + b"}h" + bytes([levels]) + b"Ns."


@pytest.mark.parametrize(
    ("data", "is_apart"),
    [
        (pickle.dumps({"segments": []}), False),
        (_shared(40), True),
        (b"\x80\x04" + b")" + b"\x85" * 40_000 + b".", True),
        (b"\x80\x04}r\xff\xff\xff\x7f.", False),  # a table of 2^31 entries
        (b"\x80\x04B\xff\xff\xff\xff", False),  # 4 GiB of bytes
        (b"\x80\x04cos\nsystem\n.", False),
    ],
)
def test_a_pickle_is_read_in_a_process_of_its_own_if_it_could_stop_this_one(
    data: bytes, is_apart: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    limits = resource.getrlimit(resource.RLIMIT_AS)
    monkeypatch.setattr(readers, "APART_OF", 1 << 40)
    assert readers._nests(data) == is_apart
    examine(READERS["snapshot-bytes"], data, tmp_path)
    assert resource.getrlimit(resource.RLIMIT_AS) == limits


def _faulty(path: Path) -> object:
    """Fails where three values are as nothing but coverage leads to."""
    data = path.read_bytes()
    if data[:1] != b"m":
        return 1
    if data[1:2] != b"E":
        return 2
    if data[2:3] != b"~":
        return 3
    raise ZeroDivisionError


def test_the_fuzzer_finds_a_fault_that_only_coverage_leads_to(tmp_path: Path) -> None:
    atheris = pytest.importorskip("atheris")
    from tests.fuzz.one_reader import run

    reader = Reader(name="faulty", seeds=lambda: [b"x"], shape=BYTES, file="x", read=atheris.instrument_func(_faulty))
    pid = os.fork()
    if pid == 0:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        try:
            run(reader, tmp_path, ["-runs=60000", "-seed=1"])
        finally:
            os._exit(1)
    os.waitpid(pid, 0)
    (found,) = [path for path in tmp_path.iterdir() if path.suffix != ".txt"]
    assert found.name.startswith("ZeroDivisionError-test-fuzz-faulty")
    assert found.read_bytes().startswith(b"mE~")
