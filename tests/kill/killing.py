"""Lines of runs of `memo train`, each killed at a random instant and gone on with by the next, and what must hold after.

A line is one training: its runs are killed one after the other, the last one may end. It has checkpoints, written in the
background, and its activations on disk; losses and the last checkpoint must be those of a run that nobody disturbed.

    start        from the first instruction of `memo train` to its first step
    steps        within a step, copies to and from the disk in flight
    checkpoint   while files of a checkpoint are written, synced or renamed
    exit         from the last step to the process's end
"""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import ready_python

PHASES = ("start", "steps", "checkpoint", "exit")
STEPS = 40
_LONGEST_S = 300.0
_ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}
_MODEL = ["--model", "tiny", "--layers", 2, "--hidden", 64, "--heads", 1, "--seq", 128, "--dropout", 0.1]
_WHERE = ["--on", "cpu", "--offload", "disk"]


class Find(AssertionError):
    """Something that a kill must not leave behind, or change."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """One kill, and what the process was doing as far as its files tell."""

    phase: str
    steps: int
    """Lines of metrics at that instant."""
    wrote_checkpoint: bool
    """A checkpoint was being written."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Undisturbed:
    """A run that nobody killed."""

    losses: list[float]
    weights: bytes
    """Content of its last checkpoint."""
    start_s: float
    """Seconds until its first step was over."""
    step_s: float
    exit_s: float
    """Seconds from the last step to its end."""


def undisturbed(folder: Path) -> Undisturbed:
    """Runs a line without a kill, in a folder that does not exist yet."""
    line = _Line(folder)
    ready_python.run("-c", "")  # the first one waits for the interpreter's imports
    begin = time.monotonic()
    run = line.start()
    line.wait(run, lambda: line.steps() >= 1)
    first = time.monotonic()
    line.wait(run, lambda: line.steps() >= STEPS)
    last = time.monotonic()
    line.finish(run)
    return Undisturbed(
        losses=line.losses(),
        weights=line.weights(),
        start_s=first - begin,
        step_s=(last - first) / (STEPS - 1),
        exit_s=time.monotonic() - last,
    )


def kill_line(folder: Path, *, phases: list[str], reference: Undisturbed, seed: int) -> list[Kill]:
    """Runs a line whose runs are killed in these phases, one after the other, then to its end. Returns the kills.

    A run that ends before its instant has come is no kill, and ends the line.

    Raises:
        Find: files were left, a run did not go on, or losses or weights differ.
    """
    line, draw, kills = _Line(folder), random.Random(seed), []
    for phase in phases:
        run = line.start()
        if not line.wait_for_phase(run, phase, draw, reference):
            break
        kills.append(Kill(phase=phase, steps=line.steps(), wrote_checkpoint=phase != "start" and line.writes()))
        run.kill()
        if run.wait(60) != -signal.SIGKILL:
            kills.pop()
            break
        if left := [path.name for path in line.scratch.iterdir()]:
            raise Find(f"after a kill in {phase} the scratch folder has {left}")
    else:
        run = line.start()
    line.finish(run)
    if line.losses() != reference.losses:
        raise Find(f"losses differ: {line.losses()} instead of {reference.losses}")
    if line.weights() != reference.weights:
        raise Find("the weights of the last checkpoint differ")
    return kills


class _Line:
    """Files of a line, and its runs."""

    def __init__(self, folder: Path) -> None:
        self.scratch, self.saved, self.metrics = folder / "scratch", folder / "saved", folder / "metrics"
        self.scratch.mkdir(parents=True)
        self.text = folder / "text.txt"
        self.text.write_text("".join(f"line {i} of a small training text, {i * i}\n" for i in range(2000)))

    def start(self) -> ready_python.Program:
        files = ["--data", self.text, "--metrics", self.metrics, "--disk", self.scratch]
        saving = ["--checkpoint-dir", self.saved, "--checkpoint-every", 1, "--checkpoint-keep", 3, "--resume"]
        return ready_python.start(
            "-m", "memo.cli.main", "train", *_MODEL, *_WHERE, "--steps", STEPS, *files, *saving, env=_ENVIRONMENT
        )

    def finish(self, run: ready_python.Program) -> None:
        out, errors = run.communicate(_LONGEST_S)
        if run.returncode != 0:
            raise Find(f"a resumed run ended with {run.returncode}: {out[-1000:]}{errors[-3000:]}")
        left = [*self.scratch.iterdir(), *(path for path in self.saved.iterdir() if path.name.startswith("."))]
        if left:
            raise Find(f"left after the last run: {[path.name for path in left]}")

    def wait(self, run: ready_python.Program, condition: Callable[[], bool]) -> bool:
        """Waits for the condition; False where the run has ended before it.

        Raises:
            Find: no step has ended for so long that the run hangs.
        """
        end, steps = time.monotonic() + _LONGEST_S, self.steps()
        while not condition():
            if run.poll() is not None:
                return condition()
            if time.monotonic() > end:
                if self.steps() == steps:
                    run.kill()
                    raise Find(f"a run hangs after {steps} steps")
                end, steps = time.monotonic() + _LONGEST_S, self.steps()
            time.sleep(0.001)
        return True

    def wait_for_phase(
        self, run: ready_python.Program, phase: str, draw: random.Random, reference: Undisturbed
    ) -> bool:
        """Waits for a random instant of a phase; False where the run has ended before it."""
        before = self.steps()
        match phase:
            case "start":
                begun, longest = True, reference.start_s
            case "steps":
                wanted = before + draw.randint(1, 3)
                begun, longest = self.wait(run, lambda: self.steps() >= wanted), reference.step_s
            case "checkpoint":
                # Until its first step a run may see what the one before it left half written.
                begun = self.wait(run, lambda: self.steps() > before and self.writes())
                longest = reference.step_s / 2
            case _:
                begun, longest = self.wait(run, lambda: self.steps() >= STEPS), reference.exit_s
        time.sleep(draw.uniform(0, longest))
        return begun and run.poll() is None

    def steps(self) -> int:
        return self.metrics.read_text().count("\n") if self.metrics.exists() else 0

    def writes(self) -> bool:
        return self.saved.exists() and any(path.name.startswith(".") for path in self.saved.iterdir())

    def losses(self) -> list[float]:
        lines = [json.loads(line) for line in self.metrics.read_text().splitlines()]
        if [line["step"] for line in lines] != list(range(1, STEPS + 1)):
            raise Find(f"steps in the metrics: {[line['step'] for line in lines]}")
        return [line["loss"] for line in lines]

    def weights(self) -> bytes:
        return (self.saved / f"step-{STEPS:08d}" / "__0_0.distcp").read_bytes()
