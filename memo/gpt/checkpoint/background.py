"""Checkpoints that are written while training goes on.

Owns the copy of the state and the thread that writes it. What a checkpoint is, and that it is whole or not there, is
memo.gpt.checkpoint.directory's business; so a kill at any moment costs the checkpoint that was being written and no other.

    step n      copy to host memory     steps n+1, n+2, ...                      step n+k
    thread                              write, fsync, rename  (CheckpointDir)    failure? told once, training goes on

While one is being written host memory holds the state a second time: twelve bytes a parameter with AdamW in float32.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import torch

from memo.errors import CheckpointError
from memo.gpt.checkpoint.directory import Checkpoint, CheckpointDir
from memo.gpt.checkpoint.random_state import random_state

__all__ = ["BackgroundCheckpointDir"]


class BackgroundCheckpointDir:
    """As CheckpointDir, with at most one checkpoint under way in the background."""

    def __init__(self, path: Path, *, keep: int) -> None:
        self._directory = CheckpointDir(path, keep=keep)
        self._writer: threading.Thread | None = None
        self._failure: BaseException | None = None

    @property
    def path(self) -> Path:
        return self._directory.path

    def latest(self) -> tuple[Checkpoint | None, list[str]]:
        """As CheckpointDir's."""
        return self._directory.latest()

    def is_empty(self) -> bool:
        """As CheckpointDir's."""
        return self._directory.is_empty()

    @property
    def busy(self) -> bool:
        """A checkpoint is being written."""
        return self._writer is not None and self._writer.is_alive()

    def ready(self, wanted: bool) -> bool:
        """Whether one that is wanted can begin now, without waiting for the disk."""
        return wanted and not self.busy

    def save(self, step: int, state: dict[str, Any], settings: dict[str, Any], *, wait: bool) -> None:
        """Begins the checkpoint of `step`, and with `wait` returns when it is on disk.

        The caller may change `state` afterwards. Waits for the one before it, whose failure `failure` still tells.

        Raises:
            CheckpointError: with `wait`, it could not be written; older ones are untouched.
        """
        self._join()
        if wait:
            self._directory.save(step, state, settings)
            return
        copy = _on_host({**state, "random": random_state()})
        # A daemon: a second Ctrl-C ends the process at once, and what it was writing is removed by the next run.
        self._writer = threading.Thread(
            target=self._write, args=(step, copy, settings), name=f"checkpoint of step {step}", daemon=True
        )
        self._writer.start()

    def failure(self) -> CheckpointError | None:
        """Why a checkpoint in the background was not written; each failure is told once."""
        if self.busy:
            return None
        self._join()
        failure, self._failure = self._failure, None
        if failure is None or isinstance(failure, CheckpointError):
            return failure
        raise failure  # a fault of the program, not of the disk

    def close(self) -> None:
        """Waits for what is being written, and gives the directory's lock back. Idempotent."""
        self._join()
        self._directory.close()

    def __enter__(self) -> BackgroundCheckpointDir:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            return  # at once; the lock goes with the process
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
    """The same nest of dicts with every tensor copied into host memory."""
    if isinstance(state, dict):
        return {key: _on_host(value) for key, value in state.items()}
    return state.detach().to("cpu", copy=True) if isinstance(state, torch.Tensor) else state
