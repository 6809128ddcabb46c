"""Runs the examples as a person would, and imports them as modules."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
}


def run(*command: object, **environment: str) -> str:
    """What it printed; it has to end well."""
    done = subprocess.run(
        [*map(str, command)], capture_output=True, text=True, env={**ENVIRONMENT, **environment}, timeout=280, check=False
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def example(name: str) -> ModuleType:
    """The example as a module, made anew."""
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
