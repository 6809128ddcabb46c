"""Checkpoints of a run: one directory, one subdirectory a step, each of them whole or not there.

    DIR/step-00000200/meta.json        format, step, settings of the run, sizes of the other files
                      .metadata        \\ torch.distributed.checkpoint: weights, optimizer state,
                      __0_0.distcp     / random generators
    DIR/.step-00000300.partial/        being written

A checkpoint is written under its partial name, forced to disk, and only then renamed; so a name without a dot is always
a complete checkpoint, whatever killed the writer. The directory is locked while a run writes to it; the lock is the
kernel's, on the directory itself, and goes with the process.

torch.distributed.checkpoint pickles its own metadata: a checkpoint is trusted input, as a program is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import os
import re
import shutil
import warnings
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from memo.errors import CheckpointError
from memo.gpt.checkpoint.random_state import random_state, set_random_state

__all__ = ["Checkpoint", "CheckpointDir", "cause_of"]

_FORMAT = "memo-checkpoint"
_VERSION = 1
_META = "meta.json"
_NAME = re.compile(r"step-(\d{8,})")
_PARTIAL = re.compile(r"\.step-\d{8,}\.partial")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A complete checkpoint on disk."""

    path: Path
    step: int
    """Steps done."""
    settings: dict[str, Any]
    """What the run was told, as JSON."""

    @classmethod
    def at(cls, path: Path) -> Checkpoint:
        """Reads `meta.json` and holds the files against it.

        Raises:
            CheckpointError: not a checkpoint, of another version, or files missing or cut short.
        """
        try:
            meta = json.loads((path / _META).read_text(encoding="utf-8"))
            known = (meta["format"], meta["version"]) == (_FORMAT, _VERSION)
            step, settings, files = int(meta["step"]), dict(meta["settings"]), dict(meta["files"])
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise CheckpointError(f"{path} is not a checkpoint of memo train: {_cause(error)}") from error
        if not known:
            raise CheckpointError(f"{path} has format {meta['format']} version {meta['version']}, not {_VERSION}")
        for name, nbytes in files.items():
            found = (path / name).stat().st_size if (path / name).is_file() else None
            if found != nbytes:
                raise CheckpointError(f"{path} is damaged: {name} has {found or 0} of {nbytes} bytes")
        return cls(path=path, step=step, settings=settings)

    def load(self, state: dict[str, Any]) -> None:
        """Fills the tensors of `state` in place, and the random generators, where it has them: many ranks save none.

        Raises:
            CheckpointError: a tensor is missing or has another shape; `state` may then be partly filled.
        """
        random = random_state()
        _single_process()
        try:
            reader = FileSystemReader(self.path)
            saved = reader.read_metadata().state_dict_metadata
            known = {name: value for name, value in random.items() if f"random.{name}" in saved}
            dcp_load({**state, "random": known} if known else state, storage_reader=reader, no_dist=True)
        except CheckpointException as error:
            raise CheckpointError(f"cannot load {self.path}: {_first_failure(error)}") from None
        except (OSError, RuntimeError, ValueError, KeyError, EOFError) as error:
            raise CheckpointError(f"cannot load {self.path}: {_cause(error)}") from error
        set_random_state(random)


class CheckpointDir:
    """The checkpoints of one run, oldest to newest. Holds the directory's lock until `close`."""

    def __init__(self, path: Path, *, keep: int) -> None:
        self.path = path
        self._keep = keep
        self._made = not path.exists()
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise CheckpointError(f"cannot use checkpoint directory {path}: {_cause(error)}") from error
        try:
            self._claim()
        except BaseException:
            os.close(self._lock)
            raise

    def latest(self) -> tuple[Checkpoint | None, list[str]]:
        """The newest checkpoint that is whole, and why newer ones were passed over."""
        skipped: list[str] = []
        for path in reversed(self._paths()):
            try:
                return Checkpoint.at(path), skipped
            except CheckpointError as error:
                skipped.append(str(error))
        return None, skipped

    def is_empty(self) -> bool:
        """True when there is no checkpoint, whole or damaged."""
        return not self._paths()

    def save(self, step: int, state: dict[str, Any], settings: dict[str, Any]) -> Checkpoint:
        """Writes the checkpoint of `step`, then removes the oldest beyond `keep`.

        The random generators are saved as they are now, unless `state` has them under "random".

        Raises:
            CheckpointError: it could not be written; the partial directory is gone and older checkpoints are untouched.
        """
        partial = self.begin(step)
        if partial is not None:
            failure = None
            try:
                _write(partial, {"random": random_state(), **state})
            except CheckpointException as error:
                failure = _first_failure(error)
            except (OSError, RuntimeError) as error:
                failure = _cause(error)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
            self.publish(step, settings, failure)
        return Checkpoint(path=self._target(step), step=step, settings=settings)

    def begin(self, step: int) -> Path | None:
        """Where to write the files of `step`; None when its checkpoint is there already, and whole."""
        target = self._target(step)
        if target.exists():
            try:
                Checkpoint.at(target)  # resumed and stopped again without a step between
                return None
            except CheckpointError:
                shutil.rmtree(target, ignore_errors=True)  # damaged: it was passed over, and is now made anew
        partial = self._partial(step)
        shutil.rmtree(partial, ignore_errors=True)
        return partial

    def publish(self, step: int, settings: dict[str, Any], failure: str | None = None) -> None:
        """Makes a checkpoint of the files that stand where `begin` said, then removes the oldest beyond `keep`.

        `failure` is why they are not all there.

        Raises:
            CheckpointError: the failure, or one of its own; the files are gone and older checkpoints are untouched.
        """
        target, partial = self._target(step), self._partial(step)
        try:
            if failure is not None:
                raise CheckpointError(f"cannot write {target}: {failure}")
            _seal(partial, step, settings)
            os.rename(partial, target)
            os.fsync(self._lock)
        except BaseException as error:
            shutil.rmtree(partial, ignore_errors=True)
            if isinstance(error, OSError):
                raise CheckpointError(f"cannot write {target}: {_cause(error)}") from error
            raise
        for old in self._paths()[: -self._keep]:
            shutil.rmtree(old, ignore_errors=True)

    def close(self) -> None:
        """Gives the lock back; a directory that this run made and wrote nothing to is removed. Idempotent."""
        if self._lock < 0:
            return
        if self._made:
            with contextlib.suppress(OSError):  # not empty: it stays
                self.path.rmdir()
        os.close(self._lock)
        self._lock = -1

    def __enter__(self) -> CheckpointDir:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _claim(self) -> None:
        if not os.access(self.path, os.W_OK | os.X_OK):
            raise CheckpointError(f"cannot write to checkpoint directory {self.path}; choose another --checkpoint-dir")
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EACCES):
                raise CheckpointError(
                    f"another run is writing to {self.path}; choose another --checkpoint-dir"
                ) from error
            # A file system without locks (some network mounts): go on without.
        for path in self.path.iterdir():
            if _PARTIAL.fullmatch(path.name):  # the writer was killed; the lock says that it is gone
                shutil.rmtree(path, ignore_errors=True)

    def _target(self, step: int) -> Path:
        return self.path / f"step-{step:08d}"

    def _partial(self, step: int) -> Path:
        return self.path / f".step-{step:08d}.partial"

    def _paths(self) -> list[Path]:
        steps = {int(match[1]): path for path in self.path.iterdir() if (match := _NAME.fullmatch(path.name))}
        return [steps[step] for step in sorted(steps)]


def _write(partial: Path, state: dict[str, Any]) -> None:
    """The tensors under the partial name, forced to disk."""
    _single_process()
    dcp_save(state, storage_writer=FileSystemWriter(partial, sync_files=True), no_dist=True)


def _seal(partial: Path, step: int, settings: dict[str, Any]) -> None:
    """Adds what says that the files are all there, forced to disk."""
    meta = {
        "format": _FORMAT,
        "version": _VERSION,
        "step": step,
        "settings": settings,
        "files": {path.name: path.stat().st_size for path in sorted(partial.iterdir())},
    }
    with open(partial / _META, "x", encoding="utf-8") as file:
        json.dump(meta, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    directory = os.open(partial, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _single_process() -> None:
    """No warning of torch.distributed that there is one process: that is what is meant.

    Not undone: to put the filters back is no safe thing to do in a thread.
    """
    warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)


def cause_of(error: BaseException) -> str:
    """One line on why torch.distributed.checkpoint failed."""
    return _first_failure(error) if isinstance(error, CheckpointException) else _cause(error)


def _first_failure(error: CheckpointException) -> str:
    failure, _ = next(iter(error.failures.values()))
    return _cause(failure)


def _cause(error: BaseException) -> str:
    """One line. torch's writer answers a full disk with a complaint of its own, raised while it handled the real one."""
    origin: BaseException | None = error
    while origin is not None:
        if isinstance(origin, OSError) and origin.errno is not None:
            return f"{errno.errorcode.get(origin.errno, origin.errno)} {os.strerror(origin.errno)}"
        origin = origin.__cause__ or origin.__context__
    return f"{type(error).__name__} {error}".splitlines()[0]
