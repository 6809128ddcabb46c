"""`memo pack`, `check` and `show`: formats, exit codes, hostile files, pictures."""

from __future__ import annotations

import csv
import io
import itertools
import json
import os
import pickle
import sys
import time
from pathlib import Path
from typing import NoReturn

import pytest

from memo.cli import pack
from memo.cli.main import main
from memo.errors import ExitCode, SolverFailed, SolverTimeout
from memo.mip import compile_cpp
from memo.mip.address import check, read_plan, read_problem
from memo.mip.address.portfolio import ArenaSolver

DATA = Path(__file__).parents[1] / "mip" / "data"
STEP = str(DATA / "gptm_L4_ckpt.csv")


@pytest.fixture
def plan_path(tmp_path: Path) -> Path:
    path = tmp_path / "plan.json"
    assert main(["pack", STEP, "-o", str(path)]) == ExitCode.OK
    return path


def write(path: Path, text: str | bytes) -> str:
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def test_a_plan_is_written_checked_and_shown(plan_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = read_plan(plan_path)
    assert check(plan) is None
    assert plan.arenas[0].nbytes == 3_548_414_976
    assert main(["check", str(plan_path)]) == ExitCode.OK
    assert "valid, 255 buffers in 1 arena\n" in capsys.readouterr().out
    assert main(["show", str(plan_path)]) == ExitCode.OK
    assert "3.305 GiB" in capsys.readouterr().out


@pytest.mark.parametrize("command", ["check", "show"])
def test_a_plan_is_read_from_standard_input(
    command: str, plan_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(plan_path.read_bytes())))
    assert main([command, "-"]) == ExitCode.OK
    assert "255" in capsys.readouterr().out


def test_without_a_capacity_the_shortest_time_ends_with_a_plan(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    assert main(["pack", str(DATA / "A.1048576.csv"), "--time-limit", "0.001ms", "-o", str(path)]) == ExitCode.OK
    assert check(read_plan(path)) is None


def test_a_snapshot_of_torchs_memory_says_what_torch_reserves_and_an_arena_needs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mib, path = 1 << 20, tmp_path / "snapshot.pickle"
    blocks = [
        {"address": 0, "size": 100 * mib, "state": "active_allocated", "frames": []},
        {"address": 100 * mib, "size": 500 * mib, "state": "inactive", "frames": []},
    ]
    # Beside 100 MiB that stay there are 200, 100 beside them, and 200 elsewhere while the first 200 are free.
    events = [
        {"action": action, "addr": addr * mib, "size": size * mib}
        for action, addr, size in (
            ("segment_alloc", 0, 600), ("alloc", 100, 200), ("alloc", 300, 100), ("free_completed", 100, 200),
            ("alloc", 400, 200), ("free_completed", 300, 100), ("free_completed", 400, 200),
        )
    ]  # fmt: skip
    segment = {"device": 0, "address": 0, "total_size": 600 * mib, "blocks": blocks}
    path.write_bytes(pickle.dumps({"segments": [segment], "device_traces": [events]}))
    assert main(["pack", str(path)]) == ExitCode.OK
    assert capsys.readouterr().out.startswith("torch reserves 600 MiB, an arena needs 400 MiB\n")
    assert main(["pack", str(path), "--json"]) == ExitCode.OK
    report = json.loads(capsys.readouterr().out)
    assert (report["reserved_nbytes"], report["arenas"][0]["nbytes"]) == (600 * mib, 400 * mib)
    path.write_bytes(pickle.dumps({"segments": [{"device": 0}], "device_traces": []}))
    assert main(["pack", str(path)]) == ExitCode.FAILURE
    assert "the snapshot is damaged" in assert_one_line(capsys)


def test_what_comes_before_planning_is_a_part_of_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []
    seconds = itertools.count(step=7.0)  # from one look at the clock to the next

    def stop(*_: object, time_limit_s: float, **__: object) -> NoReturn:
        given.append(time_limit_s)
        raise SolverTimeout("stopped")

    monkeypatch.setattr(pack, "solve", stop)
    monkeypatch.setattr(pack, "monotonic", lambda: next(seconds))
    assert main(["pack", STEP, "--time-limit", "60s", "--json"]) == ExitCode.NO_PLAN_IN_TIME
    assert given == [53.0]


def test_the_same_problem_gives_the_same_bytes(plan_path: Path, tmp_path: Path) -> None:
    again = tmp_path / "again.json"
    main(["pack", STEP, "-o", str(again)])
    assert again.read_bytes() == plan_path.read_bytes()


def test_a_plan_is_a_problem_too_and_round_trips(tmp_path: Path) -> None:
    rows = 'id,lower,upper,size,alignment,arena,group\nx,0,9,100,,,\n"y ,z",1,5,64,64,host slab,layers.0\n-,-3,2,0,,,\n'
    problem = read_problem(write(tmp_path / "p.csv", rows))
    second = problem.buffers[1]
    assert (second.alignment, second.arena, second.group) == (64, "host slab", "layers.0")
    plan = tmp_path / "plan.json"
    assert main(["pack", str(tmp_path / "p.csv"), "--align", "64", "-o", str(plan)]) == ExitCode.OK
    assert read_problem(plan).buffers == problem.buffers
    assert read_plan(plan).problem.alignment == 64


def test_csv_output_is_the_input_with_offsets(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "plan.csv"
    assert main(["pack", STEP, "-o", str(out)]) == ExitCode.OK
    assert capsys.readouterr().out.splitlines()[-1] == f"Wrote {out}"
    rows = list(csv.DictReader(out.read_text().splitlines()))
    assert list(rows[0]) == ["id", "lower", "upper", "size", "offset"]
    given = csv.DictReader(Path(STEP).read_text().splitlines())
    assert [row["size"] for row in rows] == [row["size"] for row in given]


def test_json_keys_carry_their_unit(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pack", STEP, "--json"]) == ExitCode.OK
    arena = json.loads(capsys.readouterr().out)["arenas"][0]
    assert arena["nbytes"] == arena["lower_bound_nbytes"] == 3_548_414_976


def test_existing_files_are_kept_without_force(plan_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = plan_path.read_bytes()
    assert main(["pack", str(DATA / "rnd_n32_s0.csv"), "-o", str(plan_path)]) == ExitCode.FAILURE
    assert "exists" in capsys.readouterr().err
    assert plan_path.read_bytes() == before
    assert main(["pack", str(DATA / "rnd_n32_s0.csv"), "-o", str(plan_path), "-f"]) == ExitCode.OK
    assert sorted(os.listdir(plan_path.parent)) == ["plan.json"], "no temporary file is left"


def test_an_unwritable_folder_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pack", STEP, "-o", str(tmp_path / "missing" / "plan.json")]) == ExitCode.FAILURE
    assert_one_line(capsys)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--capacity", "1GiB"], ExitCode.INFEASIBLE, "more than its capacity"),
        (["--capacity", "8 gigs"], ExitCode.USAGE, "cannot read"),
        (["--capacity", "slab=1GiB"], ExitCode.USAGE, "no buffer is in arena"),
        (["--align", "0"], ExitCode.USAGE, "at least 1"),
        (["--time-limit", "soon"], ExitCode.USAGE, "cannot read"),
        (["--gap=-1%"], ExitCode.USAGE, "--gap: '-1%' is not a percentage from 0% to 100%"),
        (["--gap", "200"], ExitCode.USAGE, "--gap: '200' is not a percentage from 0% to 100%"),
        (["--plot", "layout.bmp"], ExitCode.USAGE, ".html"),
    ],
)
def test_exit_codes(arguments: list[str], code: ExitCode, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pack", STEP, *arguments]) == code
    assert words in assert_one_line(capsys)


def test_timeout_crash_and_interrupt_have_codes_of_their_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hard = ["pack", str(DATA / "A.1048576.csv"), "--capacity", "1048576"]
    assert main([*hard, "--time-limit", "1ms"]) == ExitCode.NO_PLAN_IN_TIME
    assert_one_line(capsys)

    def fail(error: BaseException) -> None:
        def run(*_: object, **__: object) -> None:
            raise error

        monkeypatch.setattr(ArenaSolver, "portfolio", run)

    fail(SolverFailed("highs failed"))
    assert main(hard) == ExitCode.FAILURE
    assert_one_line(capsys)
    fail(KeyboardInterrupt())
    assert main(hard) == ExitCode.INTERRUPTED


def test_an_invalid_plan_is_code_5_with_rule_and_names(plan_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = json.loads(plan_path.read_text())
    for entry in root["buffers"]:
        entry["offset"] = 0
    broken = write(plan_path.with_name("broken.json"), json.dumps(root))
    capsys.readouterr()
    assert main(["check", broken]) == ExitCode.PLAN_INVALID
    assert "rule overlap: buffers '0' and '1'" in assert_one_line(capsys)
    assert main(["check", broken, "--json"]) == ExitCode.PLAN_INVALID
    assert json.loads(capsys.readouterr().out)["rule"] == "overlap"
    assert main(["show", broken]) == ExitCode.OK
    assert "INVALID: rule overlap" in capsys.readouterr().out


BUFFER = '{"id": "a", "start": 0, "end": 1, "nbytes": 1, "offset": 0%s}'
ARENA = '{"name": "device", "nbytes": 1, "lower_bound_nbytes": 1, "status": "optimal", "method": ""}'


def plan_text(buffers: str = BUFFER % "", arenas: str = ARENA, rest: str = "") -> str:
    return (
        '{"format": "memo-address-plan", "version": 1, "alignment": 1, '
        f'"arenas": [{arenas}], "buffers": [{buffers}]{rest}}}'
    )


HOSTILE: dict[str, str | bytes] = {
    "empty": "",
    "binary": bytes(range(256)),
    "gzip bomb": b"\x1f\x8b\x08" + b"\0" * 1000,
    "deep": "[" * 200_000,
    "deep objects": '{"a":' * 100_000,
    "array": "[]",
    "null": "null",
    "nan": plan_text(rest=', "seed": NaN'),
    "float": plan_text(rest=', "seed": 1.5'),
    "huge float": plan_text(rest=', "seed": 1e999'),
    "boolean": plan_text(rest=', "seed": true'),
    "beyond 2^63": plan_text(BUFFER.replace('"nbytes": 1', f'"nbytes": {1 << 63}') % ""),
    "5000 digits": plan_text(BUFFER.replace('"nbytes": 1', '"nbytes": ' + "9" * 5000) % ""),
    "negative size": plan_text(BUFFER.replace('"nbytes": 1', '"nbytes": -1') % ""),
    "duplicate key": plan_text(BUFFER % ', "id": "b"'),
    "duplicate id": plan_text(f"{BUFFER % ''}, {BUFFER % ''}"),
    "unknown key": plan_text(BUFFER % ', "path": "../../etc/passwd"'),
    "null for a key": plan_text(BUFFER % ', "arena": null'),
    "missing key": plan_text('{"id": "a"}'),
    "lone surrogate": plan_text(BUFFER.replace('"a"', '"\\ud800"') % ""),
    "long name": plan_text(BUFFER.replace('"a"', f'"{"x" * 5000}"') % ""),
    "a key of another format": plan_text(BUFFER % ', "gaps": [[0, 1]]'),
    "other version": plan_text().replace('"version": 1', '"version": 99'),
    "other format": plan_text().replace("memo-address-plan", "\x1b[31mplan"),
    "unknown status": plan_text(arenas=ARENA.replace("optimal", "perfect")),
    "torn": plan_text()[:-30],
}


@pytest.mark.parametrize("command", ["pack", "check", "show"])
@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_json_is_one_line_and_exit_1_within_a_second(
    name: str, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "plan.json", HOSTILE[name])
    if command == "pack" and name in {"boolean", "float", "unknown status"}:
        pytest.skip("a plan's seed and arenas are no part of its problem")
    began = time.thread_time()
    assert main([command, path]) == ExitCode.FAILURE
    assert time.thread_time() - began < 1
    assert "\x1b" not in assert_one_line(capsys)


@pytest.mark.parametrize(
    ("header", "words"),
    [
        ("id,lower,upper", "column 'size' is missing"),
        ("id,lower,upper,size,color", "column 'color' is unknown; the columns are id, lower, upper, size, "),
        ("id,lower,upper,size,size", "column 'size' appears twice"),
    ],
)
def test_a_wrong_header_names_the_column(
    header: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pack", write(tmp_path / "p.csv", f"{header}\n1,0,2,5\n")]) == ExitCode.FAILURE
    assert words in assert_one_line(capsys)


@pytest.mark.parametrize(
    "text",
    [
        "a,b\n1,2\n",
        "id,lower,upper\n",
        "id,lower,upper,size\n1,2\n",
        "id,lower,upper,size\n1,5,2,8\n",
        "id,lower,upper,size\n1,0,2,1e9\n",
        "id,lower,upper,size\n1,0,2,99999999999999999999999\n",
        "id,lower,upper,size\n1,0,2,-5\n",
        "id,lower,upper,size\n1,0,2,5\n1,0,2,5\n",
        "id,lower,upper,size,gaps\n1,0,9,5,3-4\n",
        'id,lower,upper,size\n"1,0,2,5\n',
        "id,lower,upper,size\n\x1b[2J,x,2,5\n",
    ],
)
def test_hostile_csv_is_one_line_and_exit_1(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pack", write(tmp_path / "p.csv", text)]) == ExitCode.FAILURE
    assert "\x1b" not in assert_one_line(capsys)


def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path("/dev/zero"), tmp_path, tmp_path / "missing"):
        assert main(["check", str(path)]) == ExitCode.FAILURE
        assert_one_line(capsys)


def test_names_cannot_drive_the_terminal_or_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    name = "\x1b[2J</script><img onerror=x>\u202e"
    text = plan_text(BUFFER.replace('"a"', json.dumps(name)) % "")
    page = tmp_path / "layout.html"
    assert main(["pack", write(tmp_path / "p.json", text), "--plot", str(page)]) == ExitCode.OK
    assert main(["show", str(tmp_path / "p.json")]) == ExitCode.OK
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert "\u202e" not in out
    html = page.read_text()
    assert "<img" not in html
    assert html.count("</script>") == 3  # the data, the licenses and the script
    assert "innerHTML" not in html
    assert "default-src 'none'" in html
    data = html.split('id="memo-data">')[1].split("</script>")[0]
    assert json.loads(data)["plans"][0]["buffers"][0]["name"] == name


def test_without_a_compiler_the_answer_is_of_greedy_fits(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    problem = str(DATA / "rnd_n32_s0.csv")
    main(["pack", problem, "--json"])
    with_compiler = json.loads(capsys.readouterr().out)
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    compile_cpp.load.cache_clear()
    with pytest.warns(UserWarning, match="addresses are of greedy fits"):
        assert main(["pack", problem, "--json"]) == ExitCode.OK
    compile_cpp.load.cache_clear()
    without = json.loads(capsys.readouterr().out)
    (arena,), (least,) = without["arenas"], with_compiler["arenas"]
    assert least["status"] == "optimal"
    assert least["nbytes"] <= arena["nbytes"] <= 1.2 * least["nbytes"]
    assert arena["lower_bound_nbytes"] <= least["nbytes"]
    assert (arena["status"] == "optimal") == (arena["nbytes"] == arena["lower_bound_nbytes"])


def test_a_cache_others_may_write_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "memo").mkdir()
    (tmp_path / "memo").chmod(0o777)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with pytest.raises(OSError, match="writable by others"):
        compile_cpp.open_cache()


def assert_one_line(capsys: pytest.CaptureFixture[str]) -> str:
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith("memo ")
    return error
