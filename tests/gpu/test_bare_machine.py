"""Benchmarks on a bare machine: a tree that is only unpacked, torch, numpy and nothing else; their result files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from bare import make_bare_environment

ROOT = Path(__file__).parent.parent.parent
TREE = ("memo", "swap", "allocator", "mip", "kernels", "benchmarks")


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an interpreter that has no memo, `bin/python`, and an unpacked tree, `tree`."""
    folder = tmp_path_factory.mktemp("bare")
    make_bare_environment(folder / "environment")
    (folder / "tree").mkdir()
    for name in TREE:
        (folder / "tree" / name).symlink_to(ROOT / name)
    return folder


def run_bare(bare: Path, *command: str, out: Path | None = None) -> subprocess.CompletedProcess[str]:
    """A command of the bare interpreter in the unpacked tree."""
    return subprocess.run(
        [str(bare / "environment" / "bin" / "python"), *command],
        cwd=bare / "tree",
        env={"PATH": os.environ["PATH"], "PYTHONDONTWRITEBYTECODE": "1"} | ({"OUT": str(out)} if out else {}),
        capture_output=True,
        text=True,
        check=False,
    )


IMPORTS = """
import importlib.util, os
lacking = [name for name in ("pulp", "highspy", "pytest", "hypothesis", "typer") if importlib.util.find_spec(name)]
assert not lacking, lacking
import memo, memo.swap.engine.engine, memo.allocator, memo.kernels.dispatch, memo.mip.address.solver
assert callable(memo.offload)
for module in (memo, memo.swap.engine.engine, memo.kernels.dispatch, memo.mip.address.solver):
    assert module.__file__.startswith(os.getcwd()), module.__file__
"""


def test_a_tree_that_is_only_unpacked_imports_and_needs_no_solver(bare: Path) -> None:
    done = run_bare(bare, "-c", IMPORTS)
    assert done.returncode == 0, done.stderr


PLANS = """
from memo.allocator.plan_in_background import Planning
from memo.mip.address.problem import AddressProblem, Buffer
buffers = tuple(Buffer(id=str(number), start=number, end=number + 2, nbytes=512) for number in range(3))
print(Planning(AddressProblem(buffers=buffers), time_limit_s=60.0).result().status.name)
"""


def test_the_background_planner_starts_from_a_tree_that_is_not_installed(bare: Path) -> None:
    done = run_bare(bare, "-c", PLANS)
    assert (done.returncode, done.stdout) == (0, "OPTIMAL\n"), done.stderr


ELSEWHERE = """
import sys
from benchmarks.gpu_check import lines_of
print(*lines_of([sys.executable, "-P", "-c", "import memo.swap; print('found')"], limit_s=60))
"""


def test_what_tests_start_elsewhere_finds_the_tree_that_is_not_installed(bare: Path) -> None:
    assert run_bare(bare, "-c", ELSEWHERE).stdout == "found 0\n"


EVERY_BENCHMARK = """
import contextlib, io, runpy, sys, warnings
warnings.simplefilter("ignore")  # a module that another one imported before is run once more
for name in sys.argv[1:]:
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
        sys.argv = [name, *(["plan"] if name == "gpu_plans" else [])]
        try:
            runpy.run_module(f"benchmarks.{name}", run_name="__main__")
        except SystemExit as end:
            code = end.code
    print(name, code, said.getvalue().count("\\n"), said.getvalue().strip())
"""


def test_every_benchmark_of_a_gpu_starts_on_a_bare_machine_and_says_in_a_line_that_there_is_none(bare: Path) -> None:
    names = sorted(path.stem for path in (ROOT / "benchmarks").glob("gpu_*.py") if "__main__" in path.read_text())
    done = run_bare(bare, "-c", EVERY_BENCHMARK, *names, "kernels")
    assert done.returncode == 0, done.stderr
    told = [line.split(maxsplit=3) for line in done.stdout.splitlines()]
    assert [(name, code, lines) for name, code, lines, _ in told] == [(name, "3", "1") for name in (*names, "kernels")]


TWO_CHECKS = """
import torch
from benchmarks import gpu_smoke
gpu_smoke.CHECKS = (gpu_smoke.plan, gpu_smoke.kernels)
gpu_smoke.run(torch.device("cpu"), {})
"""


def test_a_check_that_needs_a_solver_says_so_in_a_line_and_the_others_run(bare: Path) -> None:
    done = run_bare(bare, "-c", TWO_CHECKS)
    assert done.returncode == 0, done.stderr
    plan, kernels = done.stdout.splitlines()
    assert plan.split()[:3] == ["plan", "left", "out"]
    assert plan.endswith("pulp and highspy not installed")
    assert kernels.split()[:2] == ["kernels", "works"]


def test_the_smoke_checks_run_on_a_bare_machine(bare: Path) -> None:
    done = run_bare(bare, "-m", "benchmarks.gpu_smoke", "--device", "cpu")
    assert done.returncode == 0, done.stdout + done.stderr
    left_out = [line.split()[0] for line in done.stdout.splitlines() if "left out" in line]
    assert left_out == ["allocator", "plan", "gds"]


ROWS = """
import os, signal
from benchmarks.results import write_result
print(write_result("arm", {"rows": [1]}), flush=True)
write_result("arm", {"rows": [1, 2]})
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_results_go_to_out_and_a_killed_run_leaves_its_rows_and_no_run_overwrites_another(
    bare: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    runs = [run_bare(bare, "-c", ROWS, out=out) for _ in range(3)]
    assert [run.returncode for run in runs] == [-signal.SIGKILL] * 3
    paths = [Path(run.stdout.strip()) for run in runs]
    assert sorted(paths) == sorted(out.iterdir())
    assert len(set(paths)) == 3
    for path in paths:
        written = json.loads(path.read_text())
        assert written["rows"] == [1, 2]
        assert len(written["begun"]) == len(written["written"]) == len("12:34:56")
    assert paths[0].name == f"{json.loads(paths[0].read_text())['date']}-arm.json"
    assert not list((bare / "tree" / "benchmarks" / "results").glob("*-arm.json"))


def test_an_unpacked_tree_tells_the_commit_that_it_was_packed_at(tmp_path: Path) -> None:
    tree = tmp_path / "benchmarks"
    tree.mkdir()
    (tree / "results.py").write_text((ROOT / "benchmarks" / "results.py").read_text())
    (tmp_path / "COMMIT").write_text("0123456789\n")
    tell = "from benchmarks.results import commit; print(commit())"
    told = subprocess.run([sys.executable, "-c", tell], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert told.stdout == "0123456789\n"
