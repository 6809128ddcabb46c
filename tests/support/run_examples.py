"""Runs the examples as a person would, and imports them as modules."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import ready_python
from ready_ranks import run_ranks

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": "1",
    "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
}


def run(*command: object, **environment: str) -> str:
    """What it printed; it has to end well."""
    env = {**ENVIRONMENT, **environment}
    if command[0] == sys.executable:
        done = ready_python.run(*command[1:], env=env, timeout=280)
    else:
        done = subprocess.run([*map(str, command)], capture_output=True, text=True, env=env, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run_on(ranks: int, *command: object) -> str:
    """What the ranks of one job printed; each has to end well."""
    if ranks == 1:
        return run(sys.executable, *command)
    done = run_ranks(ranks, *command, timeout=280)
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
