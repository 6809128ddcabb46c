"""Background checkpoints: written by a thread while training goes on.

Owns the copy of the state and the writing thread. Does not own the files: CheckpointDir writes them completely or not at
all, so a kill at any moment costs only the checkpoint that was being written.

    step n      copy to host memory     steps n+1, n+2, ...                      step n+k
    thread                              write, fsync, rename  (CheckpointDir)    failure: reported once, training goes on

While a checkpoint is written, host memory holds a second copy of the state: 12 bytes per parameter with AdamW in float32.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch

from memo.errors import CheckpointError
from memo.gpt.checkpoint.directory import Checkpoint, CheckpointDir
from memo.gpt.checkpoint.random_state import random_state


class BackgroundCheckpointDir:
    """CheckpointDir with at most one checkpoint being written in the background.

    Args:
        path: directory of the run's checkpoints.
        keep: number of newest checkpoints to keep.

    Raises:
        CheckpointError: as CheckpointDir.
    """

    def __init__(self, path: Path, *, keep: int) -> None:
        self._directory = CheckpointDir(path, keep=keep)
        self._writer: threading.Thread | None = None
        self._failure: BaseException | None = None

    @property
    def path(self) -> Path:
        """Directory of the run's checkpoints."""
        return self._directory.path

    def latest(self) -> tuple[Checkpoint | None, list[str]]:
        """Newest complete checkpoint, and the reasons why newer ones were skipped."""
        return self._directory.latest()

    def is_empty(self) -> bool:
        """True when there is no checkpoint, complete or damaged."""
        return self._directory.is_empty()

    @property
    def busy(self) -> bool:
        """True while a checkpoint is being written."""
        return self._writer is not None and self._writer.is_alive()

    def ready(self, wanted: bool) -> bool:
        """True if a checkpoint is wanted and can begin without waiting for the one before it."""
        return wanted and not self.busy

    def save(self, step: int, state: dict[str, Any], settings: dict[str, Any], *, wait: bool) -> None:
        """Begins the checkpoint of `step`, after waiting for the one before it.

        Args:
            step: steps done.
            state: tensors in nested dicts; may be changed after the call.
            settings: JSON values to store beside the tensors.
            wait: return only when the checkpoint is on disk.

        Raises:
            CheckpointError: with `wait`, it could not be written; older checkpoints are untouched.
        """
        self._join()
        if wait:
            self._directory.save(step, state, settings)
            return
        copy = _on_host({**state, "random": random_state()})
        # A daemon, so that a second Ctrl-C ends the process at once; the next run removes the partial checkpoint.
        self._writer = threading.Thread(
            target=self._write, args=(step, copy, settings), name=f"checkpoint of step {step}", daemon=True
        )
        self._writer.start()

    def failure(self) -> CheckpointError | None:
        """Error of a background checkpoint, returned once; None without one."""
        if self.busy:
            return None
        self._join()
        failure, self._failure = self._failure, None
        if failure is None or isinstance(failure, CheckpointError):
            return failure
        raise failure  # an error in the program, not of the disk

    def close(self) -> None:
        """Waits for the checkpoint being written and releases the directory's lock. Idempotent."""
        self._join()
        self._directory.close()

    def __enter__(self) -> BackgroundCheckpointDir:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            return  # at once; the lock ends with the process
        self.close()

    def _write(self, step: int, state: dict[str, Any], settings: dict[str, Any]) -> None:
        try:
            self._directory.save(step, state, settings)
        except BaseException as error:
            self._failure = error

    def _join(self) -> None:
        if self._writer is not None:
            self._writer.join()
            self._writer = None


def _on_host(state: Any) -> Any:
    """Copy of nested dicts, with every tensor in host memory."""
    if isinstance(state, dict):
        return {key: _on_host(value) for key, value in state.items()}
    return state.detach().to("cpu", copy=True) if isinstance(state, torch.Tensor) else state
