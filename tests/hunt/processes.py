"""Examines programs in worker processes, several in turn in each; a process that dies is a find.

On a CPU they are forks of this one, which has imported what programs import; a device cannot be used by a fork.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import math
import multiprocessing
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.context import BaseContext
from typing import Any

import torch

from tests.hunt.comparison import Find, Outcome, compare
from tests.hunt.drawing import drawn
from tests.hunt.levels import levels_of
from tests.hunt.operators import DEVICE, sampled_names
from tests.hunt.program import Program
from tests.hunt.shrinking import shrink

_MOST = 50 if DEVICE == "cpu" else 200
"""Programs of one process."""
_LIMIT_S = 300.0
"""Seconds of a seed, beside those of shrinking its finds, behind which its process is killed."""

_END_S = 20.0
"""For a process that has nothing more to do: it is killed then."""

Examined = tuple[int, Outcome, list[tuple[Find, Program]]]
"""A seed, its program's outcome, and each find with the smallest program that shows it."""


def _examine(pipe: Connection, parents: Connection, args: argparse.Namespace) -> None:
    """Answers each seed with its outcome, its finds, and whether the device is lost with it, which ends this process."""
    parents.close()  # a fork's copy of the other end, with which this one would outlive its parent
    torch.set_num_threads(1)
    is_lost = False
    while not is_lost and (seed := pipe.recv()) is not None:
        program = drawn(seed, statements=args.statements)
        outcome = compare(program, args.at or levels_of(seed, args.levels))
        is_lost = _is_lost()
        if is_lost and outcome.discarded is None:
            outcome.finds.append(Find(level="?", kind="loses the device", told="torch alone does not"))
        # One of each kind: levels that fail alike fail for one reason.
        firsts = {find.kind: find for find in reversed(outcome.finds)}.values()
        finds = []
        for find in firsts:
            finds.append((find, program if is_lost else _shrunk(program, find, args.shrink)))
            is_lost = is_lost or _is_lost()  # by a program that shrinking tried
        pipe.send((outcome, finds, is_lost))


def _is_lost() -> bool:
    """Whether a kernel has failed, behind which a GPU does nothing for this process any more."""
    try:
        if DEVICE != "cpu":
            torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def _shrunk(program: Program, find: Find, limit_s: float) -> Program:
    def fails(smaller: Program) -> bool:
        return any(other.kind == find.kind for other in compare(smaller, [find.level]).finds)

    return shrink(program, fails, limit_s=limit_s)


def _prepare() -> None:
    """Imports what programs import, once for all processes, and keeps collections of garbage away from it."""

    import memo.manager.offloading
    import memo.mip.activation.solver  # noqa: F401

    sampled_names()
    gc.collect()
    gc.freeze()


@dataclasses.dataclass(slots=True)
class _Worker:
    """A process that examines programs, and the seed that it is at."""

    process: Any
    pipe: Connection
    seed: int | None = None
    examined: int = 0
    since: float = 0.0

    @classmethod
    def started(cls, context: BaseContext, args: argparse.Namespace) -> _Worker:
        ours, theirs = context.Pipe()
        process = context.Process(target=_examine, args=(theirs, ours, args))  # type: ignore[attr-defined]
        process.start()
        theirs.close()
        return cls(process, ours)

    def begin(self, seed: int) -> None:
        self.seed, self.since = seed, time.monotonic()
        with contextlib.suppress(OSError):  # it has died since its last answer: `answer` says so
            self.pipe.send(seed)

    def answer(self, args: argparse.Namespace) -> tuple[Examined, bool]:
        """What it found out about its seed, and whether it goes on. It has answered, died, or been silent for too long."""
        seed, self.seed = self.seed, None
        assert seed is not None
        told = "it does not end"
        if self.pipe.poll():
            try:
                outcome, finds, is_lost = self.pipe.recv()
            except (EOFError, OSError):
                self.process.join()
                told = f"its process ended with {self.process.exitcode}"
            else:
                self.examined += 1
                return (seed, outcome, finds), not is_lost and self.examined < _MOST
        self.process.kill()
        find = Find(level="?", kind="dies", told=told)
        return (seed, Outcome(finds=[find]), [(find, drawn(seed, statements=args.statements))]), False

    def end(self) -> None:
        if self.seed is not None:
            self.process.kill()
        with contextlib.suppress(OSError):  # it has died, or ended itself
            self.pipe.send(None)
        self.process.join(_END_S)
        self.process.kill()
        self.pipe.close()


def outcomes(seeds: range, args: argparse.Namespace) -> Iterator[Examined]:
    """The outcome of each seed, in their order, `args.workers` at a time.

    None begins after `args.minutes`; those under way are finished.
    """
    context = multiprocessing.get_context("fork" if DEVICE == "cpu" else "spawn")
    until = time.monotonic() + 60 * args.minutes if args.minutes else math.inf
    left, told = iter(seeds), iter(seeds)
    done: dict[int, Examined] = {}
    following = next(told, None)
    workers: list[_Worker] = []
    _prepare()
    try:
        while True:
            while sum(worker.seed is not None for worker in workers) < args.workers and time.monotonic() < until:
                if (seed := next(left, None)) is None:
                    break
                worker = next((worker for worker in workers if worker.seed is None), None)
                if worker is None:
                    workers.append(worker := _Worker.started(context, args))
                worker.begin(seed)
            busy = {worker.pipe: worker for worker in workers if worker.seed is not None}
            if not busy:
                return
            patience = min(worker.since for worker in busy.values()) + _LIMIT_S + args.shrink - time.monotonic()
            for pipe in wait(list(busy), timeout=max(0.0, patience)) or [min(busy, key=lambda one: busy[one].since)]:
                worker = busy[pipe]  # type: ignore[index]
                examined, goes_on = worker.answer(args)
                if not goes_on:
                    workers.remove(worker)
                    worker.end()
                done[examined[0]] = examined
            while following in done:
                yield done.pop(following)
                following = next(told, None)
    finally:
        for worker in workers:
            worker.end()
