"""Interrupts training steps at executed lines of memo's files, one place in each, and checks that nothing is left or lost.

    python -m tests.interrupt [--places 20000] [--seed 0] [--case NAME] [--most 50]

Each place is tried in a model of its own: in the step an exception is raised there, as by Ctrl-C or by a handler of an
alarm; the next step's gradients must be those without memo, bit for bit, and `close` must leave nothing. Each line of the
code is tried in each case before any is tried twice; with as many places as there are, each is tried once. Exit 1 where
anything was found.
"""

from __future__ import annotations

import argparse
import collections
import sys
import tempfile
import time

import torch

from tests.interrupt.interrupting import CASES, Find, collect, draw_places, interrupt

_COLLECTED = 200


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.interrupt", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--places", type=int, default=1_000_000, help="(default: all)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", choices=list(CASES), action="append", help="these alone")
    parser.add_argument("--most", type=int, default=50, help="finds that end the run")
    args = parser.parse_args()
    torch.set_num_threads(1)
    begun, tried, finds = time.monotonic(), collections.Counter[str](), collections.Counter[str]()
    with tempfile.TemporaryDirectory() as disk:
        drawn, all_places = draw_places(args.places, args.seed, args.case or list(CASES), disk)
        print(f"{len(drawn)} of {all_places} places", flush=True)
        for number, place in enumerate(drawn, 1):
            try:
                interrupt(place, disk)
            except Find as find:
                finds[place.case] += 1
                print(f"FOUND {place}: {find}", flush=True)
                if finds.total() >= args.most:
                    break
            tried[place.case] += 1
            if number % _COLLECTED == 0:
                collect()
                print(f"{number} places, {time.monotonic() - begun:.0f} s", flush=True)
    seconds = time.monotonic() - begun
    print(f"{tried.total()} of {all_places} places tried in {seconds:.0f} s {dict(tried)}; {finds.total()} finds")
    return 1 if finds else 0


if __name__ == "__main__":
    sys.exit(main())
