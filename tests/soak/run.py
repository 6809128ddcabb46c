"""The disturbed run: training with memo while faults are injected, compared with the undisturbed run step by step."""

from __future__ import annotations

import dataclasses
import faulthandler
import tempfile
import time
import traceback
import warnings
from contextlib import ExitStack
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from faulty_file import Faults

import memo
from memo.errors import MemoError
from memo.gpt.checkpoint.background import BackgroundCheckpointDir
from memo.gpt.train.checkpoint_cadence import CheckpointCadence
from memo.machine import return_freed_memory, rss_bytes
from memo.manager import Manager
from memo.swap.disk import DiskStore
from tests.soak.faults import Fault, Injector
from tests.soak.memory_group import MemoryGroup
from tests.soak.pressure import Pressure
from tests.soak.resources import Sample, sample
from tests.soak.training import packed, step_of, trainer_of, unpacked

ROOM = 24 << 20
"""Bytes of device memory above what the process has when a manager is opened; a step of the longest sequence needs more."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Settings of a soak."""

    steps: int
    minutes: float
    fault_every: int
    """Steps from one fault to the next; half of them from one sample to the next."""
    seed: int
    checkpoint_minutes: float = 0.05
    reopen_every: int = 1000
    """Steps of one manager, at most."""


@dataclasses.dataclass(slots=True)
class Soaked:
    """What a soak has seen."""

    steps: int = 0
    """Of the training, from the first on without a gap."""
    steps_run: int = 0
    """Those that were run again after a resume, and those that ended in an error, counted too."""
    seconds: float = 0.0
    evaluations: int = 0
    checkpoints: int = 0
    resumes: int = 0
    managers: int = 0
    planned_steps: int = 0
    """Steps by a plan that was made while training."""
    moving_steps: int = 0
    """Steps that wrote to disk."""
    bytes_disk: int = 0
    faults: dict[str, Fault] = dataclasses.field(default_factory=dict)
    not_run: list[str] = dataclasses.field(default_factory=list)
    """Kinds of faults that cannot be had here, each with the reason."""
    samples: list[Sample] = dataclasses.field(default_factory=list)
    find: str | None = None
    """What should not have been; it ends the soak."""


def soak(settings: Settings, undisturbed: Connection, control: Connection) -> None:
    """Runs until the last step, the end of the time or a find; in a process of its own.

    Args:
        settings: of the soak.
        undisturbed: gives the packed record of each step of the run without memo.
        control: is told "stop" when this process is to be stopped for a second, and answers when it has been; is told
            the number of each step that begins, and at last a Soaked.
    """
    faulthandler.enable()
    torch.set_num_threads(1)
    return_freed_memory()
    warnings.simplefilter("ignore", RuntimeWarning)  # of failed writes and slow plans, which are what is provoked
    with tempfile.TemporaryDirectory(prefix="memo-soak-") as folder, ExitStack() as stack:
        run = _Run(settings, undisturbed, control, Path(folder), stack)
        run.go()
        control.send(run.soaked)


class _Run:
    """State of one disturbed run."""

    def __init__(
        self, settings: Settings, undisturbed: Connection, control: Connection, folder: Path, stack: ExitStack
    ) -> None:
        self.settings = settings
        self.soaked = Soaked()
        self._undisturbed, self._control = undisturbed, control
        self._stopping = False
        self._budget = 0
        self._injector = Injector(settings.seed, self._be_stopped, self._pressure(folder))
        self._put_under_stores(self._injector.script)
        self._scratch = folder / "scratch"
        self._scratch.mkdir()
        self._expected: list[bytes] = []  # from the step after the oldest checkpoint on
        self._first_expected = 1
        self._trainer = trainer_of(settings.seed)
        self._kept = folder / "checkpoints"
        self._checkpoints = BackgroundCheckpointDir(self._kept, keep=2)
        stack.callback(lambda: self._checkpoints.close())
        self._cadence = CheckpointCadence(steps=0, minutes=settings.checkpoint_minutes, done=0)
        self._save(wait=True)
        self._manager = self._opened()
        stack.callback(lambda: self._manager.close())

    def go(self) -> None:
        """Runs steps until the soak ends."""
        soaked, settings = self.soaked, self.settings
        begun = time.monotonic()
        while soaked.steps < settings.steps and soaked.seconds < 60 * settings.minutes and soaked.find is None:
            if soaked.steps_run % settings.fault_every == settings.fault_every // 2:
                self._injector.inject()
            self._control.send(soaked.steps + 1)
            soaked.find = self._step()
            soaked.steps_run += 1
            if soaked.steps_run % (settings.fault_every // 2) == 0:
                soaked.samples.append(sample(soaked.steps_run, self._kept))
            if soaked.steps_run % settings.reopen_every == 0 and soaked.find is None:
                self._reopen()
            soaked.seconds = time.monotonic() - begun
        soaked.faults = self._injector.told
        soaked.bytes_disk += self._manager.stats.bytes_disk

    def _step(self) -> str | None:
        """Runs one step; returns what should not have been."""
        step, before = self.soaked.steps + 1, self._manager.stats.bytes_disk
        try:
            got = step_of(self._trainer, step, self.settings.seed)
        except MemoError as error:
            self._been_stopped()
            why = self._injector.outcome(error)
            if why is not None:
                traceback.print_exception(error)
            return why or self._resume()
        self._been_stopped()
        self.soaked.planned_steps += self._manager.plan is not None
        self.soaked.moving_steps += self._manager.stats.bytes_disk > before
        if packed(got) != (want := self._record(step)):
            return f"step {step}: {got}, and undisturbed {unpacked(want)}"
        self.soaked.steps = step
        self.soaked.evaluations += got.eval_loss == got.eval_loss
        if self._checkpoints.ready(self._cadence.due(step)):
            self._save(wait=False)
        if (failure := self._checkpoints.failure()) is not None:
            return f"a checkpoint failed: {failure}"
        return self._injector.outcome(None)

    def _record(self, step: int) -> bytes:
        while step >= self._first_expected + len(self._expected):
            self._expected.append(self._undisturbed.recv_bytes())
        return self._expected[step - self._first_expected]

    def _save(self, *, wait: bool) -> None:
        oldest = self._checkpoints.latest()[0]
        if oldest is not None:  # and may be resumed from until the next one is whole
            del self._expected[: oldest.step + 1 - self._first_expected]
            self._first_expected = max(self._first_expected, oldest.step + 1)
        self._cadence.begun(self.soaked.steps)
        self._checkpoints.save(self.soaked.steps, self._trainer.state(), {}, wait=wait)
        self.soaked.checkpoints += 1

    def _resume(self) -> str | None:
        """Goes on from the newest checkpoint: with the manager that raised, every second time with another one."""
        self.soaked.resumes += 1
        self._trainer.optimizer.zero_grad(set_to_none=True)
        if self.soaked.resumes % 2:
            self._reopen()
        self._checkpoints.close()  # as a run does that ends: what is being written is completed
        self._checkpoints = BackgroundCheckpointDir(self._kept, keep=2)
        newest, skipped = self._checkpoints.latest()
        if newest is None or skipped:
            return f"no whole checkpoint after step {self.soaked.steps}: {skipped}"
        newest.load(self._trainer.state())
        self.soaked.steps = newest.step
        return None

    def _reopen(self) -> None:
        self.soaked.bytes_disk += self._manager.stats.bytes_disk
        self._manager.close()
        self._manager = self._opened()

    def _opened(self) -> Manager:
        self._budget = rss_bytes() + ROOM
        manager = memo.offload(
            self._trainer.model,
            device=self._budget,
            disk=self._scratch,
            disk_budget="128MiB",
            min_bytes="4KiB",
            verify=True,
        )
        self._trainer.around_forward = manager
        self.soaked.managers += 1
        return manager

    def _pressure(self, folder: Path) -> Pressure | None:
        try:
            group = MemoryGroup()
        except OSError as error:
            self.soaked.not_run.append(f"memory pressure by cgroup, which needs a group of the run's own: {error}")
            return None
        return Pressure(group, folder, lambda: self._budget - rss_bytes())

    @staticmethod
    def _put_under_stores(script: Faults) -> None:
        options: dict[str, Any] = DiskStore.__init__.__kwdefaults__ or {}
        options["open_file"] = script.open

    def _be_stopped(self) -> None:
        self._control.send("stop")
        self._stopping = True

    def _been_stopped(self) -> None:
        """Waits until this process has been stopped, if it is to be."""
        if self._stopping:
            self._control.recv()
            self._stopping = False
