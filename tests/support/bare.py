"""A virtual environment as on a bare GPU machine: torch and what it requires, numpy, Triton; no memo, solvers or pytest.

    python tests/support/bare.py FOLDER [MODULE_PATH ...]

makes FOLDER from the packages of the interpreter that runs it, by links. Each MODULE_PATH is a file that the environment
imports at start, with its folder on the path: the emulated device's operators.
"""

from __future__ import annotations

import importlib.metadata
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

WANTED = ("torch", "numpy", "triton")


def make_bare_environment(folder: Path, starts: Sequence[Path] = ()) -> Path:
    """Makes the environment and returns its interpreter."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = folder / "lib" / version / "site-packages"
    for source in _top_levels():
        (packages / source.name).symlink_to(source)
    for number, start in enumerate(starts):
        line = f"import sys; sys.path.insert(0, {str(start.parent)!r}); import {start.stem}\n"
        (packages / f"start{number}.pth").write_text(line)
    return folder / "bin" / "python"


def _top_levels() -> set[Path]:
    """Files and folders of the wanted distributions, right under site-packages."""
    found: set[Path] = set()
    for distribution in _closure():
        for file in distribution.files or ():
            top = file.parts[0]
            if top not in ("..", "__pycache__"):
                found.add(Path(str(distribution.locate_file(top))))
    return found


def _closure() -> list[importlib.metadata.Distribution]:
    """The wanted distributions and what they require, as far as it is installed."""
    found: dict[str, importlib.metadata.Distribution] = {}
    queue = list(WANTED)
    while queue:
        name = re.sub(r"[-_.]+", "-", queue.pop()).lower()
        if name in found:
            continue
        try:
            found[name] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:  # of another platform, or of an extra
            continue
        for requirement in found[name].requires or ():
            if "extra ==" not in requirement:
                queue.append(re.split(r"[^A-Za-z0-9._-]", requirement, maxsplit=1)[0])
    return list(found.values())


if __name__ == "__main__":
    print(make_bare_environment(Path(sys.argv[1]), [Path(path).resolve() for path in sys.argv[2:]]))
