"""Failure of a rank: all ranks end soon, and their errors name the first cause.

    a rank raises     it writes its error to torchrun's store, and exits; its connections close
    the others        their collective fails, they read the store, and raise that rank's error
    a rank is killed  it writes nothing; the others exit too, and torchrun reports the rank and its signal
    a rank hangs      one that waits in a collective after SIGTERM exits after GRACE_S

torchrun restarts the run (--max-restarts), and --resume continues from the newest checkpoint.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import threading
from collections.abc import Iterator

import torch
import torch.distributed as dist

from memo.errors import MemoError, PeerLost
from memo.parallel.store import meeting_store
from memo.threads import signals_told

# Seconds from SIGTERM to the exit, at most. torchrun kills after 30.
GRACE_S = 20.0

_STORE_TIMEOUT = datetime.timedelta(seconds=5)
# Parts of torch's and gloo's messages for a lost connection; they have no error class for it.
_LOST = (
    "Connection closed",
    "Connection reset",
    "Broken pipe",
    "Timed out waiting",
    "NCCL",
    "Socket",
    "connectFullMesh",
)


@contextlib.contextmanager
def first_cause(rank: int) -> Iterator[None]:
    """Converts an exception of the block into one that names the rank that failed first, and its reason.

    Args:
        rank: of this process.

    Raises:
        PeerLost: another rank failed first.
        MemoError: this rank failed first, with a MemoError; its message is prefixed with `rank N: `. Other exceptions pass
            unchanged.
    """
    try:
        yield
    except Exception as error:
        own = _own_cause(error)
        if own is None:
            raise PeerLost(
                f"rank {rank}: {_published() or 'another rank exited without an error message; torchrun names it'}"
            ) from error
        _publish(f"rank {rank}: {_described(own)}")
        if isinstance(own, MemoError):
            raise type(own)(f"rank {rank}: {own}") from error
        if own is error:
            raise
        raise own from error


def _own_cause(error: BaseException) -> BaseException | None:
    """This rank's own error, without the wrapping of a pipeline stage; None for a lost connection."""
    origin: BaseException | None = error
    while origin is not None:
        if isinstance(origin, (MemoError, torch.OutOfMemoryError)):
            return origin
        if isinstance(origin, dist.DistError) or (
            isinstance(origin, RuntimeError) and any(mark in str(origin) for mark in _LOST)
        ):
            return None
        origin = origin.__cause__
    return error


def _described(error: BaseException) -> str:
    """One line for the other ranks: the innermost cause, which pipelines wrap in messages about shapes."""
    if isinstance(error, MemoError):
        return str(error)
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"


_KEY = "first-failure"


def _publish(cause: str) -> None:
    with contextlib.suppress(RuntimeError, KeyError, ValueError):  # no store, nobody to tell
        meeting_store(timeout=_STORE_TIMEOUT).compare_set(_KEY, "", " ".join(cause.split())[:2000])


def _published() -> str | None:
    try:
        store = meeting_store(timeout=_STORE_TIMEOUT)
        return str(store.get(_KEY).decode()) if store.check([_KEY]) else None
    except (RuntimeError, KeyError, ValueError):
        return None


@contextlib.contextmanager
def ended_by_signal(grace_s: float = GRACE_S) -> Iterator[None]:
    """Makes SIGTERM end the process within `grace_s` seconds, even while it waits in a collective.

    Python runs signal handlers between bytecodes, never inside a collective. So a thread exits the process when the block
    has not ended in time.
    """

    def end_in_time(number: int, over: threading.Event) -> None:
        if number == signal.SIGTERM and not over.wait(grace_s):
            os.write(2, b"memo train: still waiting for another rank long after SIGTERM; ending\n")
            os._exit(128 + signal.SIGTERM)

    with signals_told(end_in_time):
        yield
