r"""Checkpoint directory of a run: one subdirectory per step, each complete or absent.

    DIR/step-00000200/meta.json        format, step, settings of the run, sizes of the other files
                      .metadata        \ torch.distributed.checkpoint: weights, optimizer state,
                      __0_0.distcp     / random generators
    DIR/.step-00000300.partial/        being written

Invariant: a name without a leading dot is a complete checkpoint, whatever killed the writer. Files are written under the
partial name, synced to disk, and only then renamed. The directory is locked while a run writes to it; the lock is the
kernel's, on the directory itself, and ends with the process.

Nothing that is read from a checkpoint is executed: memo.gpt.checkpoint.plain_reader.
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
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from memo.bounded_files import Refused, is_file_name, read_object
from memo.errors import CheckpointError
from memo.gpt.checkpoint.plain_reader import PlainReader
from memo.gpt.checkpoint.random_state import random_state, set_random_state

_FORMAT = "memo-checkpoint"
_VERSION = 1
_META = "meta.json"
_NAME = re.compile(r"step-(\d{8,})")
_PARTIAL = re.compile(r"\.step-\d{8,}\.partial")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """Complete checkpoint on disk."""

    path: Path
    step: int
    """Number of steps done."""
    settings: dict[str, Any]
    """Settings of the run, as JSON values."""

    @classmethod
    def at(cls, path: Path) -> Checkpoint:
        """Reads `meta.json` and checks that the files have the sizes it lists.

        Raises:
            CheckpointError: not a checkpoint, of another version, or files missing or truncated.
        """
        try:
            meta = read_object(path / _META)
        except (OSError, Refused) as error:
            raise CheckpointError(f"{path} is not a checkpoint of memo train: {_cause(error)}") from error
        if (meta.get("format"), meta.get("version")) != (_FORMAT, _VERSION):
            given = f"format {str(meta.get('format'))[:80]} version {str(meta.get('version'))[:80]}"
            raise CheckpointError(f"{path} has {given}, not {_VERSION}")
        step, settings, files = meta.get("step"), meta.get("settings"), meta.get("files")
        if type(step) is not int or not isinstance(settings, dict) or not isinstance(files, dict):
            raise CheckpointError(
                f"{path} is not a checkpoint of memo train: {_META} lacks its step, settings or files"
            )
        for name, nbytes in files.items():
            if not is_file_name(name):
                raise CheckpointError(f"{path} names the file {name[:80]!r}, which is outside it")
            found = (path / name).stat().st_size if (path / name).is_file() else None
            if found != nbytes:
                raise CheckpointError(f"{path} is damaged: {name[:80]} has {found or 0} of {str(nbytes)[:40]} bytes")
        return cls(path=path, step=step, settings=settings)

    def verify(self) -> None:
        """Reads all tensors and compares their checksums.

        Raises:
            CheckpointError: a file has its size and is damaged.
        """
        try:
            PlainReader(self.path).verify()
        except (OSError, Refused) as error:
            raise CheckpointError(f"{self.path} is damaged: {_cause(error)}") from None

    def load(self, state: dict[str, Any]) -> None:
        """Loads the tensors of `state` in place, and the RNG state where the checkpoint has it; many ranks save none.

        Raises:
            CheckpointError: a tensor is missing or has another shape; `state` may then be partly filled.
        """
        random = random_state()
        _single_process()
        try:
            reader = PlainReader(self.path)
            saved = reader.read_metadata().state_dict_metadata
            known = {name: value for name, value in random.items() if f"random.{name}" in saved}
            dcp_load({**state, "random": known} if known else state, storage_reader=reader, no_dist=True)
        except CheckpointException as error:
            raise CheckpointError(f"cannot load {self.path}: {_first_failure(error)}") from None
        except (OSError, RuntimeError, ValueError, KeyError, EOFError) as error:
            raise CheckpointError(f"cannot load {self.path}: {_cause(error)}") from error
        set_random_state(random)


def newest(directory: Path, *, verify: bool = False) -> tuple[Checkpoint | None, list[str]]:
    """Newest complete checkpoint of a directory that exists, and the reasons why newer ones were skipped.

    Takes no lock; a run may be writing others. With `verify` it is read as a whole, else its files have their sizes.
    """
    skipped: list[str] = []
    for path in reversed(_paths(directory)):
        try:
            found = Checkpoint.at(path)
            if verify:
                found.verify()
            return found, skipped
        except CheckpointError as error:
            skipped.append(str(error))
    return None, skipped


def step_path(directory: Path, step: int) -> Path:
    """Path of a step's checkpoint."""
    return directory / f"step-{step:08d}"


def _paths(directory: Path) -> list[Path]:
    """Checkpoints, complete or damaged, in the order of their steps."""
    steps = {int(match[1]): path for path in directory.iterdir() if (match := _NAME.fullmatch(path.name))}
    return [steps[step] for step in sorted(steps)]


class CheckpointDir:
    """Checkpoints of one run. Holds the directory's lock until `close`.

    Args:
        path: the directory; created if it does not exist.
        keep: number of newest checkpoints to keep.

    Raises:
        CheckpointError: the directory cannot be used, or another run writes to it.
    """

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
        """Newest complete checkpoint, and the reasons why newer ones were skipped."""
        return newest(self.path, verify=True)

    def is_empty(self) -> bool:
        """True when there is no checkpoint, complete or damaged."""
        return not self._paths()

    def save(self, step: int, state: dict[str, Any], settings: dict[str, Any]) -> Checkpoint:
        """Writes the checkpoint of `step`, then removes the oldest beyond `keep`.

        Args:
            step: steps done.
            state: tensors in nested dicts; the current RNG state is added unless `state` has the key "random".
            settings: JSON values to store beside the tensors.

        Raises:
            CheckpointError: it could not be written; the partial directory is removed, older checkpoints are untouched.
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
                _remove(partial)
                raise
            self.publish(step, settings, failure)
        return Checkpoint(path=self._target(step), step=step, settings=settings)

    def begin(self, step: int) -> Path | None:
        """Directory to write the files of `step` to; None when its checkpoint exists and is complete."""
        target = self._target(step)
        if target.exists():
            try:
                Checkpoint.at(target).verify()  # resumed and stopped again without a step in between
                return None
            except CheckpointError:
                _remove(target)  # damaged, so it is written again
        partial = self._partial(step)
        _remove(partial)
        return partial

    def publish(self, step: int, settings: dict[str, Any], failure: str | None = None) -> None:
        """Turns the files in the directory of `begin` into a checkpoint, then removes the oldest beyond `keep`.

        Args:
            step: steps done.
            settings: JSON values to store beside the tensors.
            failure: reason why the files are not complete; None if they are.

        Raises:
            CheckpointError: `failure`, or an error of this call; the files are removed, older checkpoints are untouched.
        """
        target, partial = self._target(step), self._partial(step)
        try:
            if failure is not None:
                raise CheckpointError(f"cannot write {target}: {failure}")
            _seal(partial, step, settings)
            os.rename(partial, target)
            os.fsync(self._lock)
        except BaseException as error:
            _remove(partial)
            if isinstance(error, OSError):
                raise CheckpointError(f"cannot write {target}: {_cause(error)}") from error
            raise
        former = [path for path in self._paths() if path.name <= target.name]  # later ones are damaged
        for old in former[: -self._keep]:
            _remove(old)

    def close(self) -> None:
        """Releases the lock, and removes the directory if this run created it and it is empty. Idempotent."""
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
            # A file system without locks (some network mounts): continue without one.
        for path in self.path.iterdir():
            if _PARTIAL.fullmatch(path.name):  # its writer was killed, since this run has the lock
                _remove(path)

    def _target(self, step: int) -> Path:
        return step_path(self.path, step)

    def _partial(self, step: int) -> Path:
        return self.path / f".step-{step:08d}.partial"

    def _paths(self) -> list[Path]:
        return _paths(self.path)


def _remove(path: Path) -> None:
    """Removes a directory with all that is in it, or a link instead of what it leads to; without an error."""
    if path.is_symlink():
        with contextlib.suppress(OSError):
            path.unlink()
    shutil.rmtree(path, ignore_errors=True)


def _write(partial: Path, state: dict[str, Any]) -> None:
    """Writes the tensors under the partial name and syncs them to disk."""
    _single_process()
    dcp_save(state, storage_writer=FileSystemWriter(partial, sync_files=True), no_dist=True)


def _seal(partial: Path, step: int, settings: dict[str, Any]) -> None:
    """Adds meta.json, which lists the complete files, and syncs it to disk."""
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
    """Silences torch.distributed's warning about a single process, which is intended.

    The filter is not removed again, since warning filters cannot be restored safely from a thread.
    """
    warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)


def cause_of(error: BaseException) -> str:
    """One line with the reason why torch.distributed.checkpoint failed."""
    return _first_failure(error) if isinstance(error, CheckpointException) else _cause(error)


def _first_failure(error: CheckpointException) -> str:
    failure, _ = next(iter(error.failures.values()))
    return _cause(failure)


def _cause(error: BaseException) -> str:
    """One line with the errno of the first OSError in the chain, since torch's writer raises another error over it."""
    origin: BaseException | None = error
    while origin is not None:
        if isinstance(origin, OSError) and origin.errno is not None:
            return f"{errno.errorcode.get(origin.errno, origin.errno)} {os.strerror(origin.errno)}"
        origin = origin.__cause__ or origin.__context__
    return str(error) if isinstance(error, Refused) else f"{type(error).__name__} {error}".splitlines()[0]
