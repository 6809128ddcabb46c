"""PyPI's other package that imports as `memo` is told in one line: beside memo-train, over it, and after its removal."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
CODE = {"command": "from memo.cli.main import main; main()", "import": "import memo.manager"}


@pytest.fixture
def installed(tmp_path: Path) -> Path:
    """A folder as pip would fill it."""
    package = tmp_path / "memo"
    package.mkdir()
    for path in (*(ROOT / "memo").iterdir(), *(ROOT / name for name in ("swap", "allocator", "mip", "kernels"))):
        (package / path.name).symlink_to(path)
    return package


def run(package: Path, code: str) -> tuple[int, list[str]]:
    done = subprocess.run(
        [sys.executable, "-c", code, "--version"],
        cwd=package.parent,
        env={"PYTHONPATH": str(package.parent)},
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stderr.splitlines()


def replace(package: Path, text: str | None) -> None:
    (package / "__init__.py").unlink()
    if text is not None:
        (package / "__init__.py").write_text(text)


def test_an_installation_of_its_own_says_nothing(installed: Path) -> None:
    assert [run(installed, code) for code in CODE.values()] == [(0, []), (0, [])]


@pytest.mark.parametrize("text", ["from memo._grid import grid\n", None], ids=["over", "removed"])
def test_without_its_own_init_the_command_and_the_packages_end_in_one_line(installed: Path, text: str | None) -> None:
    (installed / "_grid.py").write_text("grid = None\n")
    replace(installed, text)
    code, said = run(installed, CODE["command"])
    assert code == 1
    assert len(said) == 1
    assert said[0].startswith("memo: ")
    code, told = run(installed, CODE["import"])
    assert code == 1
    assert told[-1] == f"ImportError: {said[0].removeprefix('memo: ')}"
    assert told[-1].endswith("pip uninstall memo, then install memo-train again with --force-reinstall")


def test_beside_it_is_a_warning(installed: Path) -> None:
    for name in ("_runner.py", "_grid.py"):
        (installed / name).touch()
    code, said = run(installed, CODE["import"])
    assert code == 0
    assert sum("another package named memo" in line for line in said) == 1
