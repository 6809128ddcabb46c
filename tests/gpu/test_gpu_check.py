"""`make gpu-check` itself, as far as no GPU is needed: it misses no test, fits its time, and fails with a line."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import gpu_check, gpu_smoke

TESTS = Path(__file__).parent.parent
TEN_MINUTES = 600


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """As if there were a GPU; the answer tells which parts ran."""
    ran: list[str] = []

    def part(name: str) -> Any:
        return lambda: (ran.append(name), {"exit": int(name == "table"), "seconds": 0.0, "summary": "ran"})[1]

    monkeypatch.setattr(gpu_check, "gpu", lambda: {"gpu": "none", "driver": "0", "torch": "0"})
    monkeypatch.setattr(gpu_check, "install", lambda: True)
    monkeypatch.setattr(gpu_check, "PARTS", {name: part(name) for name in gpu_check.PARTS})
    monkeypatch.setattr(gpu_check, "write_result", lambda name, body: sorted(body))
    return ran


def test_every_test_that_needs_a_gpu_is_run() -> None:
    marked = [path for path in TESTS.rglob("test_*.py") if "mark.gpu" in path.read_text() and path != Path(__file__)]
    assert marked
    run = [TESTS.parent / path for paths in gpu_check.GPU_TESTS.values() for path in paths]
    assert all(path.exists() for path in run)
    assert [path for path in marked if not any(path.is_relative_to(part) for part in run)] == []


def test_all_parts_together_end_within_ten_minutes_the_cheapest_first() -> None:
    assert list(gpu_check.LIMITS_S) == list(gpu_check.PARTS)
    assert next(iter(gpu_check.PARTS)) == "smoke"
    assert sum(gpu_check.LIMITS_S.values()) < TEN_MINUTES - 30  # to install this package, and to begin


def test_one_part_that_fails_is_told_and_the_others_run(
    on_a_gpu: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu_check.main([]) == 1
    assert on_a_gpu == list(gpu_check.PARTS)
    told = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in told if "FAILED" in line] == ["table"]
    assert gpu_check.main(["rates", "smoke"]) == 0
    assert on_a_gpu[len(gpu_check.PARTS) :] == ["rates", "smoke"]


TWO_AND_TWO = """
import pytest
@pytest.mark.gpu
@pytest.mark.parametrize("answer", [4, 4, 5])
def test_sum(answer): assert 2 + 2 == answer
@pytest.mark.gpu
def test_not_here(): pytest.skip("no abacus")
def test_of_no_gpu(): assert False
"""


def test_how_tests_ended_is_counted_as_they_end(tmp_path: Path) -> None:
    tests = tmp_path / "tests" / "test_sums.py"
    tests.parent.mkdir()
    tests.write_text(TWO_AND_TWO)
    ran = gpu_check.run_tests([str(tests)], limit_s=250)  # processes that import torch
    assert ran["exit"] == 1
    assert ran["tests"] == {"passed": 2, "failed": 1, "skipped": 1}
    assert [name.partition("::")[2] for name in ran["failed"]] == ["test_sum[5]"]
    assert "1 failed, 2 passed, 1 skipped" in ran["summary"]


HANGS = """
import subprocess, sys, time
print(subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"]).pid, flush=True)
time.sleep(100)
"""


def test_what_takes_too_long_ends_with_all_that_it_started() -> None:
    *said, code = gpu_check.lines_of([sys.executable, "-c", HANGS], limit_s=2)
    assert code == -signal.SIGKILL
    child = Path(f"/proc/{said[0]}")
    deadline = time.monotonic() + 10
    while child.exists() and "\nState:\tZ" not in (child / "status").read_text() and time.monotonic() < deadline:
        os.sched_yield()
    assert not child.exists() or "\nState:\tZ" in (child / "status").read_text()
    assert gpu_check.run_part([sys.executable, "-c", HANGS], limit_s=1)["summary"] == "stopped after 1 s"


def test_a_missing_package_is_a_line(
    on_a_gpu: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(gpu_check.NEEDED, "no_such_module", "no-such-package")
    assert gpu_check.main([]) == 1
    assert on_a_gpu == []
    assert capsys.readouterr().err.count("\n") == 1


def test_what_is_no_part_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["smokes"]) == 2
    assert "no part is called 'smokes'" in capsys.readouterr().err


def test_a_machine_without_nvidia_smi_has_an_unknown_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_check._driver() == "unknown"


def test_the_smoke_checks_work_where_there_is_no_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    environment = dict(os.environ)
    try:
        assert gpu_smoke.main(["--device", "cpu"]) == 0
    finally:
        os.environ.clear()
        os.environ.update(environment)
        torch.use_deterministic_algorithms(False)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines] == [[check.__name__, "works"] for check in gpu_smoke.CHECKS]


def test_a_smoke_check_that_fails_lets_the_others_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(_: torch.device) -> str:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(gpu_smoke, "CHECKS", (broken, gpu_smoke.kernels))
    done = gpu_smoke.run(torch.device("cpu"), {})
    assert [result["works"] for result in done.values()] == [False, True]
    assert "no such kernel" in capsys.readouterr().out
