"""Random layers with and without memo: each program that differs, with its seed and its text.

    python -m benchmarks.random_layers [--seeds 0:200] [--points 1,0.5,0,matmuls,thirds,input] [--dtypes float32,bfloat16]
                                       [--statements 10] [--workers 2] [--show SEED]

A seed gives a program (tests/support/random_layers.py). Three steps of a model of three such layers, of other lengths and
inputs, are compared bit for bit: losses, gradients, buffers, what the layers keep in Python, random numbers. Programs that
torch alone does not run, or not twice the same, are discarded; where torch raises because of a change in place, memo must
raise as well. A process that dies is a failure of the seed that it was at.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import multiprocessing
import sys
import time
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from benchmarks.results import ROOT, write_result

sys.path.insert(0, str(ROOT / "tests" / "support"))

from random_layers import KINDS, POINTS, Outcome, Program, compare, program
from random_statements import STATEMENTS

__all__ = ["main"]

_CHUNK = 25
"""Seeds of one process."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Points and types at which each seed's program is compared."""

    points: dict[str, Any]
    kinds: tuple[torch.dtype, ...]
    statements: int

    def program(self, seed: int) -> Program:
        return program(seed, statements=self.statements)


def _examine(sender: Connection, seeds: list[int], work: Work) -> None:
    torch.set_num_threads(1)
    for seed in seeds:
        sender.send((seed, None))
        made = work.program(seed)
        sender.send((seed, (made.statements, compare(made, work.points, work.kinds))))
    sender.close()


class _Totals:
    def __init__(self) -> None:
        self.examined = self.discarded = self.compared = 0
        self.failures: list[dict[str, Any]] = []
        self.reasons: collections.Counter[str] = collections.Counter()
        self.refused: collections.Counter[str] = collections.Counter()
        self.statements: collections.Counter[str] = collections.Counter()
        self.failing: collections.Counter[str] = collections.Counter()
        self.moved: collections.Counter[str] = collections.Counter()
        self.recomputed: collections.Counter[str] = collections.Counter()
        self.divided: collections.Counter[str] = collections.Counter()
        self.of: collections.Counter[str] = collections.Counter()

    def add(self, seed: int, statements: tuple[str, ...], outcome: Outcome, text: str) -> None:
        self.examined += 1
        self.compared += outcome.compared
        if outcome.discarded is not None:
            self.discarded += not outcome.compared
            self.reasons[outcome.discarded[:90]] += 1
        if outcome.failures:
            self.failing.update(set(statements))
            self.failures.append({"seed": seed, "failures": outcome.failures, "text": text})
            print(f"\nseed {seed}\n  " + "\n  ".join(outcome.failures) + f"\n{text}", flush=True)
        self.statements.update(set(statements))
        self.refused.update(outcome.refused)
        for at, nbytes in outcome.moved_bytes.items():
            self.of[at] += 1
            self.moved[at] += nbytes
            self.recomputed[at] += outcome.recomputed_bytes[at]
            self.divided[at] += outcome.recomputed_bytes[at] > 0

    def body(self) -> dict[str, Any]:
        return {
            "examined": self.examined,
            "discarded": self.discarded,
            "discarded_for": dict(self.reasons.most_common(30)),
            "compared": self.compared,
            "failing": len(self.failures),
            "points": {
                at: {
                    "compared": self.of[at],
                    "divided": self.divided[at],
                    "moved_bytes": self.moved[at],
                    "recomputed_bytes": self.recomputed[at],
                }
                for at in self.of
            },
            "refused": dict(self.refused.most_common(30)),
            "never_drawn": sorted(set(STATEMENTS) - set(self.statements)),
            "failures": self.failures,
        }

    def tell(self) -> None:
        print(
            f"\n{self.examined} programs, {self.discarded} discarded, {self.compared} comparisons, "
            f"{len(self.failures)} programs fail"
        )
        for at in self.of:
            whole = self.moved.get(f"1,{at.partition(',')[2]}", 0) / max(self.of[f"1,{at.partition(',')[2]}"], 1)
            share = self.moved[at] / self.of[at] / whole if whole else float("nan")
            print(
                f"  {at:18} {self.of[at]:6} compared, {self.divided[at]:6} of them recompute; "
                f"{share:.2f} of alpha 1's bytes move"
            )
        for name, count in self.failing.most_common(12):
            print(f"  in {count} of {self.statements[name]} with {name!r} something fails")
        for reason, count in self.reasons.most_common(8):
            print(f"  {count:5} without a comparison: {reason}")
        for reason, count in self.refused.most_common(8):
            print(f"  {count:5} layers refused at alpha 0: {reason[:120]}")


def examine(seeds: range, work: Work, workers: int, timeout_s: float = 240.0) -> _Totals:
    """Compares the programs of these seeds, in processes that each do a few."""
    context = multiprocessing.get_context("fork")
    waiting = [list(seeds[at : at + _CHUNK]) for at in range(0, len(seeds), _CHUNK)][::-1]
    running: dict[Connection, list[Any]] = {}  # process, seeds still to do, time of the last word
    totals = _Totals()

    def ended(receiver: Connection, why: str) -> None:
        process, left, _ = running.pop(receiver)
        process.kill()
        process.join()
        receiver.close()
        if left:
            text = work.program(left[0]).text
            totals.add(left[0], (), Outcome(failures=[f"{why}, exit code {process.exitcode}"], compared=1), text)
            waiting.append(left[1:])

    while waiting or running:
        while waiting and len(running) < workers:
            if not (some := waiting.pop()):
                continue
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_examine, args=(sender, some, work))
            process.start()
            sender.close()
            running[receiver] = [process, some, time.monotonic()]
        for receiver in wait(list(running), timeout=1.0):
            assert isinstance(receiver, Connection)
            row = running[receiver]
            try:
                seed, found = receiver.recv()
            except EOFError:
                ended(receiver, "its process died")
                continue
            row[2] = time.monotonic()
            if found is not None:
                row[1] = row[1][1:]
                totals.add(seed, *found, work.program(seed).text)
        for receiver, (_, _, last) in list(running.items()):
            if time.monotonic() - last > timeout_s:
                ended(receiver, f"no end after {timeout_s:.0f} s")
    return totals


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", default="0:200", help="A:B, from A to before B")
    parser.add_argument("--points", default=",".join(POINTS))
    parser.add_argument("--dtypes", default=",".join(str(kind).removeprefix("torch.") for kind in KINDS))
    parser.add_argument("--statements", type=int, default=10, help="the most of a layer")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--show", type=int, metavar="SEED", help="print this program and what fails in it")
    args = parser.parse_args()
    work = Work(
        points={name: POINTS[name] for name in args.points.split(",")},
        kinds=tuple(getattr(torch, name) for name in args.dtypes.split(",")),
        statements=args.statements,
    )
    torch.set_num_threads(1)
    if args.show is not None:
        made = work.program(args.show)
        print(made.text)
        outcome = compare(made, work.points, work.kinds)
        print("\n".join(outcome.failures) or f"nothing fails in {outcome.compared} comparisons ({outcome.discarded})")
        return 1 if outcome.failures else 0
    first, _, last = args.seeds.partition(":")
    seeds = range(int(first), int(last))
    begun = time.monotonic()
    totals = examine(seeds, work, args.workers)
    seconds = time.monotonic() - begun
    totals.tell()
    rate = len(seeds) / seconds
    print(f"{rate:.1f} programs/s, {totals.compared / seconds:.1f} comparisons/s with {args.workers} workers")
    head = {
        "torch": torch.__version__,
        "seeds": args.seeds,
        "points": list(work.points),
        "dtypes": args.dtypes,
        "statements": args.statements,
        "seconds": seconds,
    }
    print(f"Wrote {write_result('random-layers', {**head, **totals.body()})}")
    return 1 if totals.failures else 0


if __name__ == "__main__":
    sys.exit(main())
