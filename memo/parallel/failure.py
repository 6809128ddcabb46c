"""How a run of many ranks ends when one of them cannot go on: soon, everywhere, and with the first cause named.

    a rank raises     it leaves its error in the store that torchrun keeps, and ends; its connections close
    the others        their collective fails, they read the store, and end with that rank's error
    a rank is killed  it leaves nothing; the others end too, and torchrun says which one got which signal
    nothing returns   a rank asked to end that sits in a collective for ever is ended after GRACE_S

Restarting is torchrun's part (--max-restarts), going on from the newest checkpoint that of --resume.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import socket
import threading
from collections.abc import Iterator

import torch
import torch.distributed as dist

from memo.errors import MemoError, PeerLost
from memo.parallel.store import meeting_store

__all__ = ["GRACE_S", "ended_by_signal", "first_cause"]

# Seconds between a request to end and the end, at the latest. torchrun kills after 30.
GRACE_S = 20.0

_STORE_TIMEOUT = datetime.timedelta(seconds=5)
# What torch and gloo say when the other end of a connection is gone; they have no error class of their own for it.
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
    """Turns what ends the block into an error that says which rank ended first, and why.

    Raises:
        PeerLost: another rank ended first.
        MemoError: this rank did; `rank N: ` stands before its message.
    """
    try:
        yield
    except Exception as error:
        own = _own_cause(error)
        if own is None:
            raise PeerLost(
                f"rank {rank}: {_told() or 'another rank ended without a word; torchrun names it'}"
            ) from error
        _tell(f"rank {rank}: {_in_words(own)}")
        if isinstance(own, MemoError):
            raise type(own)(f"rank {rank}: {own}") from error
        if own is error:
            raise
        raise own from error


def _own_cause(error: BaseException) -> BaseException | None:
    """What this rank did wrong, without the wrapping a pipeline stage puts around it; None where a peer is gone."""
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


def _in_words(error: BaseException) -> str:
    """A pipeline wraps what went wrong in tensors' shapes; what the other ranks are told is the cause beneath."""
    if isinstance(error, MemoError):
        return str(error)
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"


_KEY = "first-failure"


def _tell(what: str) -> None:
    with contextlib.suppress(RuntimeError, KeyError, ValueError):  # no store, nobody to tell
        meeting_store(timeout=_STORE_TIMEOUT).compare_set(_KEY, "", " ".join(what.split())[:2000])


def _told() -> str | None:
    try:
        store = meeting_store(timeout=_STORE_TIMEOUT)
        return str(store.get(_KEY).decode()) if store.check([_KEY]) else None
    except (RuntimeError, KeyError, ValueError):
        return None


@contextlib.contextmanager
def ended_by_signal(grace_s: float = GRACE_S) -> Iterator[None]:
    """SIGTERM ends the process within `grace_s`, also one that waits in a collective and never comes back to Python.

    Python runs signal handlers between its own instructions. A waiting thread is told by the wakeup descriptor, which is
    written to at once.
    """
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    former = signal.set_wakeup_fd(ours.fileno(), warn_on_full_buffer=False)
    over = threading.Event()
    threading.Thread(target=_watch, args=(theirs, over, grace_s), name="memo-deadline", daemon=True).start()
    try:
        yield
    finally:
        over.set()
        signal.set_wakeup_fd(former)
        ours.close()


def _watch(socket_: socket.socket, over: threading.Event, grace_s: float) -> None:
    with socket_:
        while number := socket_.recv(1):
            if number[0] == signal.SIGTERM:
                break
        if number and not over.wait(grace_s):
            os.write(2, b"memo train: still waiting for another rank long after SIGTERM; ending\n")
            os._exit(128 + signal.SIGTERM)
