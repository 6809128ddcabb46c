"""The other end of the pipe: starts a way's process with the interpreter that has its library, asks, and ends it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.peers.request import Request
from benchmarks.results import ROOT

ENVIRONMENTS = {"TRL OffloadActivations": "trl", "DeepSpeed checkpointing": "deepspeed"}
"""Ways whose library has an environment of its own, made by `make peers`."""


def interpreter_of(way: str, device: str) -> str:
    """The interpreter that runs a way: its library's environment on a CPU, where there is one; else this one."""
    name = ENVIRONMENTS.get(way)
    found = ROOT / "build" / "integrations" / (name or "") / "bin" / "python"
    return str(found) if name is not None and device == "cpu" and found.exists() else sys.executable


class Process:
    """One way in a process of its own; usable as a context manager."""

    def __init__(self, request: Request, *, threads: int | None = None) -> None:
        self.request = request
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed with the process
        environment = dict(os.environ)
        if threads is not None:
            environment["OMP_NUM_THREADS"] = str(threads)
        self._process = subprocess.Popen(
            [interpreter_of(request.way, request.device), "-m", "benchmarks.peers.worker"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors, text=True, cwd=ROOT, env=environment,
        )  # fmt: skip
        self.started = self.ask("start", **request.to_json())

    def ask(self, do: str, **asked: Any) -> dict[str, Any]:
        """The answer; under "failed" the reason why there is none."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"do": do, **asked}) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            return {"failed": self._last_words()}
        line = self._process.stdout.readline()
        found: dict[str, Any] = json.loads(line) if line else {"failed": self._last_words()}
        return found

    def step(self, steps: int = 1) -> dict[str, Any]:
        """So many steps; the figures of the last."""
        return self.ask("step", steps=steps)

    def gradients(self, file: Path) -> dict[str, Any]:
        """Writes the last step's gradients to a file that is not there, or their difference to those in it."""
        return self.ask("gradients", file=str(file))

    def _last_words(self) -> str:
        status = self._process.wait()
        self._errors.seek(0)
        said = [line for line in self._errors.read().splitlines() if line.strip()]
        return f"ended with {status}: {said[-1].strip() if said else 'it left no word'}"

    def close(self) -> None:
        """Ends the process; what it holds goes with it."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.close()
            self._process.wait(timeout=20)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        self.close()
