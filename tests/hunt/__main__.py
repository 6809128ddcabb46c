"""Hunts silent wrong gradients: random programs with and without memo, bit for bit, each find shrunk to a small program.

    python -m tests.hunt [--programs 20000] [--seed 0] [--levels 2 | --at "1;0.5, late"] [--statements 9] [--shrink 60]
                         [--minutes M] [--write]
    python -m tests.hunt --show SEED [--at LEVEL]

A seed gives a program (drawing.py): layers, a model that calls them, three steps. Each is run without memo and at `--levels`
levels that its seed draws (levels.py). Losses, gradients, buffers, what layers keep in Python and random numbers are
compared. Programs that torch alone does not run, or not twice the same, are discarded; where torch raises, memo must raise
as well. A process that dies is a find of the seed that it was at. Exit 1 where anything was found.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import multiprocessing
import sys
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from benchmarks.results import ROOT, write_result

sys.path.insert(0, str(ROOT / "tests" / "support"))

from tests.hunt.comparison import Find, Outcome, compare
from tests.hunt.drawing import MOST_STATEMENTS, catalogued, drawn
from tests.hunt.levels import LEVELS, levels_of
from tests.hunt.program import Program
from tests.hunt.shrinking import shrink

_CHUNK = 50
"""Programs of one process."""
SILENT_S = 300.0
"""A process that says nothing for so long is ended."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A find, and the smallest program that shows it."""

    seed: int
    find: Find
    program: Program

    def __str__(self) -> str:
        lines = (f"seed {self.seed} at level {self.find.level!r}: {self.find.kind}", self.find.told, self.program.text)
        return "\n".join(lines)


@dataclasses.dataclass(slots=True)
class Totals:
    """What a hunt has seen."""

    examined: int = 0
    discarded: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    compared: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    to_the_end: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    moved: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    recomputed: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    refused: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    whole: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    statements: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    operators: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    finds: list[Found] = dataclasses.field(default_factory=list)

    def add(self, program: Program, outcome: Outcome) -> None:
        """Counts one program."""
        self.examined += 1
        if outcome.discarded is not None:
            self.discarded[outcome.discarded[:80]] += 1
            return
        self.compared.update([*outcome.compared])
        self.to_the_end.update(name for name, ended in outcome.compared.items() if ended)
        self.moved.update(outcome.moved_bytes)
        self.recomputed.update(outcome.recomputed_bytes)
        self.refused.update(outcome.refused)
        self.whole.update(outcome.whole)
        self.statements.update(program.statements)
        self.operators.update(program.operators)

    def body(self) -> dict[str, Any]:
        """For the result file."""
        return {
            "programs": self.examined,
            "discarded": sum(self.discarded.values()),
            "discarded_for": dict(self.discarded.most_common(20)),
            "comparisons": sum(self.compared.values()),
            "operators": len(self.operators),
            "never_drawn": sorted(set(catalogued()) - set(self.statements)),
            "levels": {
                name: {
                    "compared": self.compared[name],
                    "to_the_end": self.to_the_end[name],
                    "moved_bytes": self.moved[name],
                    "recomputed_bytes": self.recomputed[name],
                }
                for name in LEVELS
                if self.compared[name]
            },
            "refused_loudly": dict(self.refused),
            "whole_at_0": dict(self.whole.most_common(20)),
            "finds": [
                {"seed": each.seed, **dataclasses.asdict(each.find), "text": each.program.text} for each in self.finds
            ],
        }

    def told(self) -> str:
        """A line of figures."""
        return (
            f"{self.examined} programs, {sum(self.discarded.values())} discarded, {sum(self.compared.values())} "
            f"comparisons at {len(self.compared)} levels, {len(self.operators)} operators, "
            f"{sum(self.refused.values())} refused; {len(self.finds)} finds"
        )


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


def _outcomes(seeds: range, args: argparse.Namespace) -> Iterator[tuple[int, Outcome, list[tuple[Find, Program]]]]:
    """The outcome of each seed, from processes of their own, one after the other."""
    context = multiprocessing.get_context("fork")
    left = list(seeds)
    while left:
        receiver, sender = context.Pipe(duplex=False)
        some = left[:_CHUNK]
        process = context.Process(target=_examine, args=(sender, some, args))
        process.start()
        sender.close()
        try:
            while some:
                silent = not receiver.poll(SILENT_S + args.shrink)
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


def hunt(args: argparse.Namespace) -> Totals:
    """Compares the programs of the seeds, and prints each find."""
    totals, begun, said = Totals(), time.monotonic(), time.monotonic()
    for seed, outcome, finds in _outcomes(range(args.seed, args.seed + args.programs), args):
        totals.add(drawn(seed, statements=args.statements), outcome)
        for find, program in finds:
            totals.finds.append(Found(seed=seed, find=find, program=program))
            print(f"\n{totals.finds[-1]}", flush=True)
        now = time.monotonic()
        if now - said > 60:
            print(f"{totals.told()}; {totals.examined / (now - begun):.1f} programs/s", flush=True)
            said = now
        if args.minutes and now - begun > 60 * args.minutes:
            break
    return totals


def _show(args: argparse.Namespace) -> int:
    program = drawn(args.show, statements=args.statements)
    print(program.text)
    outcome = compare(program, args.at or list(LEVELS))
    print("\n".join(f"{find.level}: {find.kind}: {find.told}" for find in outcome.finds))
    print(outcome.discarded or f"{len(outcome.compared)} levels compared, {len(outcome.finds)} finds")
    return 1 if outcome.finds else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.hunt", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--programs", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0, help="of the first program")
    parser.add_argument("--levels", type=int, default=2, help="drawn for each program")
    parser.add_argument("--at", type=lambda text: text.split(";"), help="these levels for all, or `all`")
    parser.add_argument("--statements", type=int, default=MOST_STATEMENTS, help="the most of a layer")
    parser.add_argument("--shrink", type=float, default=60.0, metavar="SECONDS", help="the most for each find")
    parser.add_argument("--minutes", type=float, help="stop after so many")
    parser.add_argument("--write", action="store_true", help="write a result file")
    parser.add_argument("--show", type=int, metavar="SEED", help="print this program and what fails in it")
    args = parser.parse_args()
    args.at = list(LEVELS) if args.at == ["all"] else args.at
    if unknown := set(args.at or ()) - set(LEVELS):
        parser.error(f"--at: no level {', '.join(sorted(unknown))}; there are {'; '.join(LEVELS)}")
    torch.set_num_threads(1)
    if args.show is not None:
        return _show(args)
    begun = time.monotonic()
    totals = hunt(args)
    seconds = time.monotonic() - begun
    print(f"{totals.told()}; {totals.examined / seconds:.1f} programs/s")
    if args.write:
        head = {"torch": torch.__version__, "seed": args.seed, "levels_each": args.levels, "seconds": round(seconds)}
        print(f"Wrote {write_result('hunt', {**head, **totals.body()})}")
    return 1 if totals.finds else 0


if __name__ == "__main__":
    sys.exit(main())
