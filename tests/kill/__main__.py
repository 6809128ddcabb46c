"""Kills `memo train` at random instants and compares what goes on with an undisturbed run, bit for bit.

    python -m tests.kill [--kills 200] [--seed 0] [--write]

Exit 1 where anything was found; its line's folder is then kept under build/kill.
"""

from __future__ import annotations

import argparse
import collections
import random
import shutil
import sys
import time

from benchmarks.results import ROOT, write_result

sys.path.insert(0, str(ROOT / "tests" / "support"))

from tests.kill.killing import PHASES, Find, Kill, kill_line, undisturbed

WORK = ROOT / "build" / "kill"
_EARLY = [*PHASES[:3], "steps", "checkpoint"]


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.kill", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true", help="write a result file")
    args = parser.parse_args()
    shutil.rmtree(WORK, ignore_errors=True)
    begun, kills, finds, lines = time.monotonic(), list[Kill](), list[str](), 0
    reference = undisturbed(WORK / "undisturbed")
    while len(kills) < args.kills:
        lines += 1
        seed = args.seed * 1_000_000 + lines
        phases = [*random.Random(seed).sample(_EARLY, len(_EARLY)), "exit"][: args.kills - len(kills)]
        folder = WORK / f"line-{seed}"
        try:
            kills += kill_line(folder, phases=phases, reference=reference, seed=seed)
            shutil.rmtree(folder)
        except Find as find:
            finds.append(f"line {seed}, killed in {' '.join(phases)}: {find}")
            print(f"FOUND {finds[-1]}  ({folder})", flush=True)
            if len(finds) == 10:
                break
        print(f"{len(kills)} kills in {lines} lines, {time.monotonic() - begun:.0f} s", flush=True)
    by_phase = dict(collections.Counter(kill.phase for kill in kills))
    writing = sum(kill.wrote_checkpoint for kill in kills)
    print(f"{len(kills)} kills {by_phase}, {writing} with a checkpoint half written; {len(finds)} finds")
    if args.write:
        figures = {"kills": len(kills), "by_phase": by_phase, "checkpoint_half_written": writing, "lines": lines}
        seconds = round(time.monotonic() - begun, 1)
        print(f"Wrote {write_result('kill', {**figures, 'seed': args.seed, 'seconds': seconds, 'finds': finds})}")
    return 1 if finds else 0


if __name__ == "__main__":
    sys.exit(main())
