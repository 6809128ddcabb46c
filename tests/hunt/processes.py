"""Examines programs in processes of their own, some after each other in each: one that dies is a find.

On a CPU they are forks of this one, which has imported what programs import; a device cannot be used by a fork.
"""

from __future__ import annotations

import argparse
import gc
import multiprocessing
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection

import torch

from tests.hunt.comparison import Find, Outcome, compare
from tests.hunt.drawing import drawn
from tests.hunt.levels import levels_of
from tests.hunt.operators import DEVICE, sampled_names
from tests.hunt.program import Program
from tests.hunt.shrinking import shrink

__all__ = ["outcomes"]

_CHUNK = 50 if DEVICE == "cpu" else 200
"""Programs of one process."""
_SILENT_S = 300.0
"""A process that says nothing for so long is ended."""


def _examine(sender: Connection, seeds: Sequence[int], args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    for seed in seeds:
        sender.send((seed, None, []))
        program = drawn(seed, statements=args.statements)
        outcome = compare(program, args.at or levels_of(seed, args.levels))
        # One of each kind: levels that fail alike fail for one reason.
        firsts = {find.kind: find for find in reversed(outcome.finds)}.values()
        sender.send((seed, outcome, [(find, _shrunk(program, find, args.shrink)) for find in firsts]))
    sender.close()


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


def outcomes(seeds: range, args: argparse.Namespace) -> Iterator[tuple[int, Outcome, list[tuple[Find, Program]]]]:
    """The outcome of each seed, from processes of their own, one after the other."""
    context = multiprocessing.get_context("fork" if DEVICE == "cpu" else "spawn")
    left = list(seeds)
    _prepare()
    while left:
        receiver, sender = context.Pipe(duplex=False)
        some = left[:_CHUNK]
        process = context.Process(target=_examine, args=(sender, some, args))
        process.start()
        sender.close()
        try:
            while some:
                silent = not receiver.poll(_SILENT_S + args.shrink)
                if silent:
                    raise EOFError
                seed, outcome, finds = receiver.recv()
                if outcome is not None:
                    some = some[1:]
                    yield seed, outcome, finds
        except EOFError:
            process.kill()
            process.join()
            told = f"its process ended with {process.exitcode}" if not silent else "it does not end"
            find = Find(level="?", kind="dies", told=told)
            yield some[0], Outcome(finds=[find]), [(find, drawn(some[0], statements=args.statements))]
            some = some[1:]
        finally:
            process.kill() if process.is_alive() and some else process.join()
            receiver.close()
        left = [*some, *left[_CHUNK:]]
