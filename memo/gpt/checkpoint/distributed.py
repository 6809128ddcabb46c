"""Checkpoints that all ranks write together, while they train on.

The directory, its lock and its names are the first rank's, by CheckpointDir; the others do as it says. Every rank writes its
own part of each tensor, so a checkpoint knows names and places in the whole, and no layout: it is read at any other.

    save     parts are copied to host memory        training goes on     a thread of each rank writes its file
    publish  all parts are on disk: the first rank adds meta.json and renames the directory, which makes it a checkpoint

The directory must be one that all nodes see.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar, cast

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import async_save

from memo.errors import CheckpointError, MemoError
from memo.gpt.checkpoint.directory import Checkpoint, CheckpointDir, cause_of

__all__ = ["DistributedCheckpointDir", "load_distributed"]

_T = TypeVar("_T")


def load_distributed(checkpoint: Checkpoint, state: dict[str, Any]) -> None:
    """Fills the tensors of `state` in place, each rank its part. A collective call.

    Random generators are not restored: a rank's are seeded anew at each step.

    Raises:
        CheckpointError: a tensor is missing or has another shape; `state` may then be partly filled.
    """
    try:
        dcp_load(state, storage_reader=FileSystemReader(checkpoint.path))
    except (CheckpointException, OSError, ValueError, KeyError, EOFError) as error:
        raise CheckpointError(f"cannot load {checkpoint.path}: {cause_of(error)}") from None


class DistributedCheckpointDir:
    """As CheckpointDir, for all ranks; every method but `failure` and `close` is a collective call."""

    def __init__(self, path: Path, *, keep: int) -> None:
        self.path = path
        self._lead = dist.get_rank() == 0
        # The writers agree on what each writes, from threads of their own: not over the group that trains.
        self._group = dist.new_group(backend="gloo")
        # And what the ranks tell each other while the writers are at work must not come between theirs.
        self._talk = dist.new_group(backend="gloo")
        self._directory: CheckpointDir | None = None
        self._writing: tuple[Future[Any], int, dict[str, Any]] | None = None
        self._failure: CheckpointError | None = None
        self._on_lead(lambda: self._open(path, keep))

    def latest(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest checkpoint that is whole, and why newer ones were passed over."""
        return self._on_lead(lambda: self._lead_directory.latest())

    def is_empty(self) -> bool:
        """True when there is no checkpoint, whole or damaged."""
        return self._on_lead(lambda: self._lead_directory.is_empty())

    def save(self, step: int, state: dict[str, Any], settings: dict[str, Any], *, wait: bool = True) -> None:
        """Begins to write the checkpoint of `step`, and finishes it when `wait`.

        Raises:
            CheckpointError: with `wait`, it could not be written; older ones are untouched.
        """
        self._settle()
        partial = self._on_lead(lambda: self._lead_directory.begin(step))
        if partial is None:
            return  # it is there already
        writer = FileSystemWriter(partial, sync_files=True)
        future = async_save(state, storage_writer=writer, process_group=self._group)
        self._writing = (cast("Future[Any]", future), step, settings)
        if wait:
            self.finish()

    def ready(self, wanted: bool) -> bool:
        """Whether one that is wanted can begin now, as the first rank sees it: its clock and its disk decide for all."""
        idle, begin = self._on_lead(lambda: (self._is_written(), wanted and self._is_written()))
        if idle:
            self._settle()
        return begin

    def failure(self) -> CheckpointError | None:
        """Why a checkpoint in the background was not written; each failure is told once. No collective call."""
        failure, self._failure = self._failure, None
        return failure

    def finish(self) -> None:
        """Waits for the checkpoint that is being written, and publishes it."""
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
        """Gives the lock back; what is still being written is left unfinished, and removed by the next run."""
        if self._directory is not None:
            self._directory.close()

    def __enter__(self) -> DistributedCheckpointDir:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _is_written(self) -> bool:
        return self._writing is None or self._writing[0].done()

    def _settle(self) -> None:
        """Publishes the one before; what became of it is for `failure` to tell."""
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
        """What the first rank's `act` gives, on every rank; its error too."""
        answer: list[Any] = [None, None]
        if self._lead:
            try:
                answer[0] = act()
            except MemoError as error:
                answer[1] = error
        dist.broadcast_object_list(answer, src=0, group=self._talk)
        if answer[1] is not None:
            raise answer[1]
        return cast("_T", answer[0])
