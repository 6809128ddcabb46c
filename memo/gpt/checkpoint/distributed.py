"""Distributed checkpoints: all ranks write their parts together, in the background of training.

The first rank owns the directory, its lock and its names, by CheckpointDir; the other ranks follow it. Every rank writes its
own part of each tensor with its offset in the whole, so a checkpoint is independent of the layout and loads at any other.

    save     parts are copied to host memory        training goes on     a thread of each rank writes its file
    publish  all parts are on disk: the first rank adds meta.json and renames the directory, which makes it a checkpoint

The directory must be on a file system that all nodes share.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save

from memo.errors import CheckpointError, MemoError
from memo.gpt.checkpoint.directory import Checkpoint, CheckpointDir, cause_of
from memo.gpt.checkpoint.plain_reader import PlainReader

_T = TypeVar("_T")


def load_distributed(checkpoint: Checkpoint, state: dict[str, Any]) -> None:
    """Loads the tensors of `state` in place, each rank its part. A collective call.

    The RNG state is not restored, since every rank seeds it again at each step.

    Raises:
        CheckpointError: a tensor is missing or has another shape; `state` may then be partly filled.
    """
    try:
        dcp_load(state, storage_reader=PlainReader(checkpoint.path))
    except (CheckpointException, OSError, ValueError, KeyError, EOFError) as error:
        raise CheckpointError(f"cannot load {checkpoint.path}: {cause_of(error)}") from None


class DistributedCheckpointDir:
    """CheckpointDir for all ranks. Every method but `failure` and `close` is a collective call.

    Args:
        path: directory of the run's checkpoints, shared by all nodes.
        keep: number of newest checkpoints to keep.

    Raises:
        CheckpointError: as CheckpointDir, on every rank.
    """

    def __init__(self, path: Path, *, keep: int) -> None:
        self.path = path
        self._lead = dist.get_rank() == 0
        # The writing threads communicate while training goes on, so they need a group of their own.
        self._group = dist.new_group(backend="gloo")
        # The ranks also exchange messages while the threads write, which need another one.
        self._control_group = dist.new_group(backend="gloo")
        self._directory: CheckpointDir | None = None
        self._writing: tuple[Future[Any], int, dict[str, Any]] | None = None
        self._failure: CheckpointError | None = None
        self._on_lead(lambda: self._open(path, keep))

    def latest(self) -> tuple[Checkpoint | None, list[str]]:
        """Newest complete checkpoint, and the reasons why newer ones were skipped."""
        return self._on_lead(lambda: self._lead_directory.latest())

    def is_empty(self) -> bool:
        """True when there is no checkpoint, complete or damaged."""
        return self._on_lead(lambda: self._lead_directory.is_empty())

    def save(self, step: int, state: dict[str, Any], settings: dict[str, Any], *, wait: bool = True) -> None:
        """Begins the checkpoint of `step`, after waiting for the one before it.

        Args:
            step: steps done.
            state: this rank's tensors in nested dicts; may be changed after the call.
            settings: JSON values to store beside the tensors.
            wait: return only when the checkpoint is on disk.

        Raises:
            CheckpointError: with `wait`, it could not be written; older checkpoints are untouched.
        """
        self._settle()
        partial = self._on_lead(lambda: self._lead_directory.begin(step))
        if partial is None:
            return  # it exists
        writer = FileSystemWriter(partial, sync_files=True)
        future = async_save(state, storage_writer=writer, process_group=self._group)
        self._writing = (cast("Future[Any]", future), step, settings)
        if wait:
            self.finish()

    def ready(self, wanted: bool) -> bool:
        """True if a checkpoint is wanted and can begin now; the first rank's clock and disk decide for all."""
        idle, begin = self._on_lead(lambda: (self._is_written(), wanted and self._is_written()))
        if idle:
            self._settle()
        return begin

    def failure(self) -> CheckpointError | None:
        """Error of a background checkpoint, returned once; None without one. Not a collective call."""
        failure, self._failure = self._failure, None
        return failure

    def finish(self) -> None:
        """Waits for the checkpoint that is being written, and publishes it.

        Raises:
            CheckpointError: it could not be written; older checkpoints are untouched.
        """
        if self._writing is None:
            return
        (future, step, settings), self._writing = self._writing, None
        failure: str | None = None
        try:
            future.result()
        except (CheckpointException, OSError, RuntimeError) as error:
            failure = cause_of(error)
        failures: list[str | None] = [None] * dist.get_world_size(self._group)
        dist.all_gather_object(failures, failure, group=self._group)
        first = next((f"rank {rank}: {what}" for rank, what in enumerate(failures) if what is not None), None)
        self._on_lead(lambda: self._lead_directory.publish(step, settings, first))

    def close(self) -> None:
        """Releases the lock. The next run removes a checkpoint that is still being written."""
        if self._directory is not None:
            self._directory.close()

    def __enter__(self) -> DistributedCheckpointDir:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _is_written(self) -> bool:
        return self._writing is None or self._writing[0].done()

    def _settle(self) -> None:
        """Publishes the checkpoint before; its error is kept for `failure`."""
        try:
            self.finish()
        except CheckpointError as error:
            self._failure = error

    @property
    def _lead_directory(self) -> CheckpointDir:
        assert self._directory is not None
        return self._directory

    def _open(self, path: Path, keep: int) -> None:
        self._directory = CheckpointDir(path, keep=keep)

    def _on_lead(self, act: Callable[[], _T]) -> _T:
        """Result or error of the first rank's `act`, on every rank."""
        answer: list[Any] = [None, None]
        if self._lead:
            try:
                answer[0] = act()
            except MemoError as error:
                answer[1] = error
        dist.broadcast_object_list(answer, src=0, group=self._control_group)
        if answer[1] is not None:
            raise answer[1]
        return cast("_T", answer[0])
