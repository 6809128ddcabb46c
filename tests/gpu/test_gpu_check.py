"""`make gpu-check` itself, as far as no GPU is needed: it misses no test, fits its time, and fails with a line."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_check

TESTS = Path(__file__).parent.parent
TEN_MINUTES = 600


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """As if there were a GPU; the answer tells which parts ran."""
    ran: list[str] = []

    def part(name: str) -> Any:
        return lambda: (ran.append(name), {"exit": int(name == "table")})[1]

    monkeypatch.setattr(gpu_check, "gpu", lambda: {"gpu": "none", "driver": "0", "torch": "0"})
    monkeypatch.setattr(gpu_check, "install", lambda: True)
    monkeypatch.setattr(gpu_check, "PARTS", {name: part(name) for name in gpu_check.PARTS})
    monkeypatch.setattr(gpu_check, "write_result", lambda name, body: sorted(body))
    return ran


def test_every_test_that_needs_a_gpu_is_run() -> None:
    marked = [path for path in TESTS.rglob("test_*.py") if "mark.gpu" in path.read_text() and path != Path(__file__)]
    assert marked
    run = [TESTS.parent / path for path in gpu_check.GPU_TESTS]
    assert all(path.exists() for path in run)
    assert [path for path in marked if not any(path.is_relative_to(part) for part in run)] == []


def test_all_parts_together_end_within_ten_minutes() -> None:
    limits = [value for name, value in vars(gpu_check).items() if name.endswith("_LIMIT_S")]
    assert len(limits) == len(gpu_check.PARTS)
    assert sum(limits) < TEN_MINUTES - 30  # to install this package, and to begin


def test_one_part_that_fails_is_told_and_the_others_run(
    on_a_gpu: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu_check.main([]) == 1
    assert on_a_gpu == ["tests", "table", "kernels", "allocators"]
    assert "table: failed" in capsys.readouterr().out
    assert gpu_check.main(["kernels"]) == 0
    assert on_a_gpu[4:] == ["kernels"]


def test_a_missing_package_is_a_line(
    on_a_gpu: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(gpu_check.NEEDED, "no_such_module", "no-such-package")
    assert gpu_check.main([]) == 1
    assert on_a_gpu == []
    assert capsys.readouterr().err.count("\n") == 1


def test_what_is_no_part_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["kernel"]) == 2
    assert "no part is called 'kernel'" in capsys.readouterr().err


def test_a_machine_without_nvidia_smi_has_an_unknown_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert gpu_check._driver() == "unknown"
