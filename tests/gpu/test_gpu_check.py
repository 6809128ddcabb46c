"""`make gpu-check` itself, as far as no GPU is needed: it misses no test, fits its time, and fails with a line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu_check, gpu_smoke, machine

TESTS = Path(__file__).parent.parent
TEN_MINUTES = 600


def forget(result: dict[str, Any]) -> None:
    """Keeps no result."""


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """As if there were a GPU; the answer tells which parts ran."""
    ran: list[str] = []
    real = gpu_check.run_part

    def run_part(part: gpu_check.Part, keep: Any) -> None:
        name = next(name for name, each in gpu_check.PARTS.items() if each is part)
        if name == "arena":  # whose packages may be missing
            real(part, keep)
            return
        ran.append(name)
        keep({"exit": int(name == "table"), "seconds": 0.0, "summary": "ran"})

    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(
        gpu_check, "gpu", lambda: dict.fromkeys(("gpu", "driver", "python", "torch", "cuda", *machine.VERSIONS), "0")
    )
    monkeypatch.setattr(gpu_check, "run_part", run_part)
    monkeypatch.setattr(gpu_check, "TESTING", ("no_such_module",))
    return ran


def test_every_test_that_needs_a_gpu_is_run() -> None:
    marked = [path for path in TESTS.rglob("test_*.py") if "mark.gpu" in path.read_text() and path != Path(__file__)]
    assert marked
    run = [TESTS.parent / path for part in gpu_check.PARTS.values() for path in part.tests]
    ignored = [TESTS.parent / path for part in gpu_check.PARTS.values() for path in part.ignored]
    assert all(path.exists() for path in run)
    assert set(ignored) <= set(run)  # by another part
    assert [path for path in marked if not any(path.is_relative_to(part) for part in run)] == []


def test_all_parts_together_end_within_ten_minutes_the_cheapest_first() -> None:
    assert next(iter(gpu_check.PARTS)) == "smoke"
    assert sum(part.limit_s for part in gpu_check.PARTS.values()) < TEN_MINUTES - 30  # to begin


def test_a_part_that_fails_or_lacks_packages_is_a_line_and_the_others_run(
    on_a_gpu: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu_check.main([]) == 1
    assert on_a_gpu == [name for name in gpu_check.PARTS if name != "arena"]
    told = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in told if "FAILED" in line] == ["table", "arena"]
    assert sum("left out: no_such_module not installed" in line for line in told) == 1
    assert gpu_check.main(["rates", "smoke"]) == 0
    assert on_a_gpu[-2:] == ["rates", "smoke"]


def test_a_run_begins_with_the_versions_of_what_is_there_and_what_is_not(
    on_a_gpu: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    gpu_check.main(["rates"])
    assert capsys.readouterr().out.splitlines()[0] == (
        "0: driver 0, python 0, torch 0, cuda 0, triton: 0, kvikio: 0, flash_attn: 0, pulp: 0, highspy: 0"
    )
    assert machine.version("flash_attn") == "not installed"


TWO_AND_TWO = """
import pytest
@pytest.mark.gpu
@pytest.mark.parametrize("answer", [4, 4, 5])
def test_sum(answer): assert 2 + 2 == answer
@pytest.mark.gpu
def test_not_here(): pytest.skip("no abacus")
def test_of_no_gpu(): assert False
"""


def part_of(folder: Path, content: str) -> gpu_check.Part:
    tests = folder / "tests" / "test_sums.py"
    tests.parent.mkdir()
    tests.write_text(content)
    return gpu_check.Part(limit_s=250, tests=(str(tests),))  # processes that import torch


def test_how_tests_ended_is_counted_and_kept_as_they_end(tmp_path: Path) -> None:
    kept: list[dict[str, Any]] = []
    ran = gpu_check.run_part(part_of(tmp_path, TWO_AND_TWO), kept.append)
    assert ran["exit"] == 1
    assert ran["tests"] == {"passed": 2, "failed": 1, "skipped": 1}
    assert [name.partition("::")[2] for name in ran["failed"]] == ["test_sum[5]"]
    assert "1 failed, 2 passed, 1 skipped" in ran["summary"]
    assert [sum(state["tests"].values()) for state in kept] == [1, 2, 3, 4, 4]
    assert [state["exit"] for state in kept] == [None, None, None, None, 1]


HANGS = """
import subprocess, sys, time
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"]).pid, flush=True)
time.sleep(100)
"""


def assert_ends(process: str) -> None:
    """Within ten seconds there is no such process, or nobody who waits for it."""
    status = Path(f"/proc/{process}/status")
    deadline = time.monotonic() + 10
    while status.exists() and "\nState:\tZ" not in status.read_text() and time.monotonic() < deadline:
        os.sched_yield()
    assert not status.exists() or "\nState:\tZ" in status.read_text()


def test_what_takes_too_long_ends_with_all_that_it_started() -> None:
    *said, code = gpu_check.lines_of([sys.executable, "-c", HANGS], limit_s=2)
    assert code == -signal.SIGKILL
    assert_ends(str(said[0]))
    assert gpu_check.Course(1, forget).follow([sys.executable, "-c", HANGS])["summary"] == "stopped after 1 s"


ONE_AND_A_HANG = """
import os, pathlib, pytest, time
@pytest.mark.gpu
def test_sum(): assert 2 + 2 == 4
@pytest.mark.gpu
def test_that_hangs():
    pathlib.Path(os.environ["OUT"], "pid").write_text(str(os.getpid()))
    time.sleep(100)
"""
RUNS = """
import runpy, signal, sys
from benchmarks import gpu_check, machine
sys.modules["xdist"] = None  # one test after the other
gpu_check.gpu = lambda: dict.fromkeys(("gpu", "driver", "python", "torch", "cuda", *machine.VERSIONS), "0")
gpu_check.PARTS = {"sums": gpu_check.Part(limit_s=250, tests=(sys.argv[1],))}
signal.signal(signal.SIGTERM, gpu_check._end)
sys.exit(gpu_check.main(["sums"]))
"""


def test_a_run_that_is_ended_leaves_what_it_had_and_nothing_running(tmp_path: Path) -> None:
    (test,) = part_of(tmp_path, ONE_AND_A_HANG).tests
    begun = subprocess.Popen(
        [sys.executable, "-c", RUNS, test], cwd=TESTS.parent, env={**os.environ, "OUT": str(tmp_path)}
    )
    hanging, deadline = tmp_path / "pid", time.monotonic() + 120
    while time.monotonic() < deadline:
        written = [path for path in (hanging, *tmp_path.glob("*.json")) if path.exists() and path.read_text()]
        if len(written) == 2:  # the test hangs, and what ended before it is in the results
            break
        time.sleep(0.1)
    begun.send_signal(signal.SIGTERM)
    assert begun.wait(timeout=60) == 128 + signal.SIGTERM
    assert_ends(hanging.read_text())
    (left,) = tmp_path.glob("*.json")
    sums = json.loads(left.read_text())["sums"]
    assert (sums["exit"], sums["tests"]) == (None, {"passed": 1})


def test_what_is_no_part_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["smokes"]) == 2
    assert "no part is called 'smokes'" in capsys.readouterr().err


def test_a_machine_without_nvidia_smi_has_an_unknown_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.driver() == "unknown"


def test_the_smoke_checks_work_where_there_is_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    environment = dict(os.environ)
    try:
        assert gpu_smoke.main(["--device", "cpu"]) == 0
    finally:
        os.environ.clear()
        os.environ.update(environment)
        torch.use_deterministic_algorithms(False)
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[0] for line in lines] == [check.__name__ for check in gpu_smoke.CHECKS]
    assert [line[0] for line in lines if line[1] != "works"] == ["allocator", "gds"]  # left out: of a GPU


def test_a_smoke_check_that_fails_lets_the_others_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(_: torch.device) -> str:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(gpu_smoke, "CHECKS", (broken, gpu_smoke.kernels))
    done = gpu_smoke.run(torch.device("cpu"), {})
    assert [result["outcome"] for result in done.values()] == ["FAILS", "works"]
    assert "no such kernel" in capsys.readouterr().out
