"""The script of the first hour on a GPU: parts fit their time, failures and cuts are told, a tree is unpacked once."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SCRIPT = ROOT / "benchmarks" / "gpu_hour.sh"
FOUR_MINUTES = 240
GRACE_S = 5
"""Between a command's limit and its end by force."""
RUN = re.compile(r"^ *(?:run|hf) (\d+) ", re.MULTILINE)
BESIDE = re.compile(r"\bbeside \w+ (\d+) ")
MODULE = re.compile(r"\b(?:run|beside \w+) \S+ ([a-z_]+\.[a-z_.]+)")
PART = re.compile(r"^  (\d)\).*?^    ;;", re.MULTILINE | re.DOTALL)


def test_the_commands_of_each_part_fit_into_four_minutes() -> None:
    parts = {match[1]: match[0] for match in PART.finditer(SCRIPT.read_text())}
    assert list(parts) == ["1", "2", "3", "4", "5", "6"]
    for commands in parts.values():
        limits, beside = ([int(seconds) + GRACE_S for seconds in each.findall(commands)] for each in (RUN, BESIDE))
        assert limits
        assert sum(limits) + max(beside, default=0) <= FOUR_MINUTES


def test_every_command_names_a_module_that_exists() -> None:
    named = modules()
    assert len(named) > 5
    assert [name for name in named if importlib.util.find_spec(name) is None] == []


def modules() -> set[str]:
    return set(MODULE.findall(SCRIPT.read_text()))


@pytest.fixture
def carried(tmp_path: Path) -> Path:
    """What travels, with a tree whose commands only say that they ran; `gpu_smoke` fails and `gpu_probe` hangs."""
    (tmp_path / "out").mkdir()
    carried = tmp_path / "carried"
    carried.mkdir()
    (carried / "gpu_hour.sh").write_text(SCRIPT.read_text())
    (carried / "trl_activation_offloading.py").write_text("")
    pack(carried, tmp_path / "tree", "first tree")
    return carried


def pack(carried: Path, tree: Path, said: str) -> None:
    """Makes memo.tgz of a tree like ours, each of whose modules prints `said`."""
    for module in modules():
        path = tree.joinpath(*module.split(".")).with_suffix(".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"print({said!r}, __spec__.name)\n")
    (tree / "benchmarks" / "machine.py").write_text("import os, sys\nsys.exit(int(os.environ.get('NO_GPU', 0)))\n")
    (tree / "benchmarks" / "gpu_smoke.py").write_text("import sys\nsys.exit(1)\n")
    (tree / "benchmarks" / "gpu_probe.py").write_text("import time\nprint('begun', flush=True)\ntime.sleep(100)\n")
    with tarfile.open(carried / "memo.tgz", "w:gz") as archive:
        archive.add(tree, ".")


def hour(carried: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """The script in its folder, with the limits of a second that a test can wait for."""
    script = carried / "gpu_hour.sh"
    script.write_text(re.sub(r"run \d+ benchmarks.gpu_probe", "run 2 benchmarks.gpu_probe", SCRIPT.read_text()))
    folder = carried.parent
    given = {"OUT": str(folder / "out"), "GPU_HOUR_WORK": str(folder / "work"), "PYTHON": sys.executable}
    return subprocess.run(
        ["bash", str(script), *arguments],
        cwd=folder,
        env={"PATH": os.environ["PATH"], **given, **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_command_that_fails_or_hangs_is_told_and_the_next_one_runs(carried: Path) -> None:
    done = hour(carried, "4")
    assert done.returncode == 1
    assert done.stdout.count("first tree benchmarks.gpu_check") == 3
    assert "failed: benchmarks.gpu_smoke (exit 1)" in done.stdout.splitlines()[-1]
    (log,) = (carried.parent / "out").glob("part4-*.log")
    assert log.read_text() == done.stdout
    done = hour(carried, "5")
    assert done.returncode == 1
    assert "begun" in done.stdout
    assert done.stdout.count("first tree") == 2
    assert "failed: benchmarks.gpu_probe (exit 124)" in done.stdout.splitlines()[-1]


def test_a_tree_is_unpacked_once_and_a_mended_one_anew(carried: Path) -> None:
    assert "first tree benchmarks.kernels" in hour(carried, "5").stdout
    unpacked = carried.parent / "work" / "tree" / "benchmarks" / "kernels.py"
    unpacked.write_text("print('left as it was')\n")
    assert "left as it was" in hour(carried, "5").stdout
    pack(carried, carried.parent / "tree", "mended tree")
    again = hour(carried, "5")
    assert "mended tree benchmarks.kernels" in again.stdout
    assert "left as it was" not in again.stdout
    assert (carried.parent / "work" / "tree" / ".gpu" / "trl_activation_offloading.py").exists()


def test_without_a_gpu_a_folder_for_results_or_a_part_nothing_runs(carried: Path) -> None:
    assert hour(carried, "5", NO_GPU="3").returncode == 3
    for arguments, environment in ((["7"], {}), ([], {}), (["1"], {"OUT": ""})):
        done = hour(carried, *arguments, **environment)
        assert (done.returncode, done.stdout, done.stderr.count("\n")) == (2, "", 1)
