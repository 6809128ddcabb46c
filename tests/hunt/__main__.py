"""Hunts silent wrong gradients: random programs with and without memo, bit for bit, each find shrunk to a small program.

    python -m tests.hunt [--programs 20000] [--seed 0] [--levels 2 | --at "1;0.5, late"] [--statements 9] [--shrink 60]
                         [--ranks 50] [--workers 1] [--minutes M] [--write] [--continue]
    python -m tests.hunt --show SEED [--at LEVEL]

A seed gives a program (drawing.py): layers, a model that calls them, three steps. Each is run without memo and at `--levels`
levels that its seed draws (levels.py). Losses, gradients, buffers, what layers keep in Python and random numbers are
compared. Programs that torch alone does not run, or not twice the same, are discarded; where torch raises, memo must raise
as well. A process that dies is a find of the seed that it was at. With `--write` a result file is written each minute;
with `--continue` a run goes on from the latest one's figures, behind its last seed, so that programs are examined in pieces.
One program in `--ranks` runs on two ranks as well (ranks.py). Exit 1 where anything was found.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator

import torch

from benchmarks.results import ROOT, commit, newest_result, write_result

sys.path.insert(0, str(ROOT / "tests" / "support"))

from tests.hunt.comparison import Find, compare
from tests.hunt.drawing import MOST_STATEMENTS, drawn
from tests.hunt.levels import LEVELS
from tests.hunt.operators import DEVICE, EMULATED
from tests.hunt.processes import outcomes
from tests.hunt.program import Program
from tests.hunt.ranks import compare_on_ranks, drawn_placement
from tests.hunt.shrinking import shrink
from tests.hunt.totals import Found, Piece, Totals

RESULT = "hunt" if DEVICE == "cpu" else "hunt-streams" if EMULATED else "hunt-gpu"
_SAID_S = 60.0
"""Between two lines of figures; a result file is written as often."""


def hunt(args: argparse.Namespace, totals: Totals) -> Totals:
    """Compares the programs of the next seeds, prints each find, and adds them to the totals as a piece of their own."""
    begun, said = time.monotonic(), time.monotonic()
    first = args.seed if args.seed is not None else totals.next_seed
    piece = Piece(commit=commit(), torch=torch.__version__, seed=first, levels_each=args.levels)
    left = args.programs - totals.examined
    totals.pieces.append(piece)
    for seed, outcome, finds in outcomes(range(first, first + left), args):
        totals.add(drawn(seed, statements=args.statements), outcome)
        if args.ranks and seed % args.ranks == 0 and DEVICE == "cpu":
            finds = [*finds, *_on_ranks(seed, args, totals)]
        for find, program in finds:
            found = Found(seed=seed, find=find, program=program)
            totals.found(found)
            print(f"\n{found}", flush=True)
        now = time.monotonic()
        piece.seconds = round(now - begun)
        if now - said > _SAID_S:
            print(f"{totals.told()}; {piece.programs / (now - begun):.1f} programs/s", flush=True)
            said = now
            if args.write:
                write_result(RESULT, totals.body())
    return totals


def _on_ranks(seed: int, args: argparse.Namespace, totals: Totals) -> Iterator[tuple[Find, Program]]:
    """What the program of this seed shows on two ranks, shrunk there."""
    program = drawn(seed, statements=args.statements)
    placement, level = drawn_placement(seed)
    outcome = compare_on_ranks(program, placement, level)
    totals.add_on_ranks(placement, outcome)
    for kind, find in {find.kind: find for find in outcome.finds}.items():

        def fails(smaller: Program, kind: str = kind) -> bool:
            return any(other.kind == kind for other in compare_on_ranks(smaller, placement, level).finds)

        yield find, shrink(program, fails, limit_s=args.shrink)


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
    parser.add_argument(
        "--programs", type=int, default=20_000, help="with --continue, those of earlier pieces among them"
    )
    parser.add_argument("--seed", type=int, help="of the first program (default: 0, or behind the last one examined)")
    parser.add_argument("--continue", action="store_true", dest="go_on", help="add to the latest result file's figures")
    parser.add_argument("--levels", type=int, default=2, help="drawn for each program")
    parser.add_argument("--at", type=lambda text: text.split(";"), help="these levels for all, or `all`")
    parser.add_argument("--statements", type=int, default=MOST_STATEMENTS, help="the most of a layer")
    parser.add_argument(
        "--ranks", type=int, default=50, metavar="N", help="one program in N runs on two ranks, too; 0: none"
    )
    parser.add_argument("--shrink", type=float, default=60.0, metavar="SECONDS", help="the most for each find")
    parser.add_argument("--workers", type=int, default=1, help="processes at a time, of one thread each")
    parser.add_argument("--minutes", type=float, help="begin no program after so many")
    parser.add_argument("--write", action="store_true", help="write a result file")
    parser.add_argument("--show", type=int, metavar="SEED", help="print this program and what fails in it")
    args = parser.parse_args()
    args.at = list(LEVELS) if args.at == ["all"] else args.at
    if args.workers < 1:
        parser.error("--workers: at least 1")
    if unknown := set(args.at or ()) - set(LEVELS):
        parser.error(f"--at: no level {', '.join(sorted(unknown))}; there are {'; '.join(LEVELS)}")
    torch.set_num_threads(1)
    if args.show is not None:
        return _show(args)
    before = newest_result(RESULT) if args.go_on else None
    totals = hunt(args, Totals() if before is None else Totals.of(before))
    print(totals.told())
    if args.write:
        print(f"Wrote {write_result(RESULT, totals.body())}")
    return 1 if totals.pieces[-1].finds else 0


if __name__ == "__main__":
    sys.exit(main())
