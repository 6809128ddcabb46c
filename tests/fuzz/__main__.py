"""Fuzzes every reader of files and texts, guided by coverage; each way to fail is kept as a file.

    python -m tests.fuzz [--inputs 1000000] [--minutes M] [--readers "trace cluster"] [--write]

Each reader has a process of its own, for `--inputs` inputs or `--minutes` minutes, and a corpus under build/fuzz that the
next run begins with. Finds go to build/fuzz/NAME/finds; kept in tests/fuzz/found/NAME they are inputs of every run, and
of the tests. Exit 1 where anything was found.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.results import ROOT, write_result

sys.path.insert(0, str(ROOT / "tests" / "support"))

from tests.fuzz.readers import MOST_BYTES, READERS, Reader

FOUND = Path(__file__).parent / "found"
WORK = ROOT / "build" / "fuzz"
LONGEST = 1 << 16
"""Bytes of an input, as a rule; a file of a MiB is an attack of its own (tests/attacks)."""
STUCK_S = 20
"""An input that takes so long ends its reader's process: ten times what it may, as machines are shared."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What one reader's run came to."""

    inputs: int
    seconds: float
    edges: int
    """Branches of memo's code that were reached."""
    corpus: int
    """Inputs that each reached something new."""
    finds: list[str]


def fuzz(reader: Reader, *, inputs: int, minutes: float | None, seed: int = 0, work: Path = WORK) -> Run:
    """Fuzzes one reader in a process of its own."""
    corpus, finds = work / reader.name / "corpus", work / reader.name / "finds"
    for folder in (corpus, finds):
        folder.mkdir(parents=True, exist_ok=True)
    for number, given in enumerate(reader.seeds()):
        (corpus / f"seed-{number}").write_bytes(given)
    kept = FOUND / reader.name
    flags = [
        f"-runs={inputs}",
        f"-max_len={LONGEST}",
        f"-timeout={STUCK_S}",
        f"-rss_limit_mb={(4 * MOST_BYTES) >> 20}",
        f"-artifact_prefix={finds}/",
        f"-seed={seed + 1}",
        "-print_final_stats=1",
        "-verbosity=1",
        str(corpus),
        *([str(kept)] if kept.is_dir() else []),
    ]
    if minutes is not None:
        flags.append(f"-max_total_time={max(1, round(60 * minutes))}")
    begun, before = time.monotonic(), {path.name for path in finds.iterdir()}
    command = [sys.executable, "-m", "tests.fuzz.one_reader", reader.name, str(finds), *flags]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, errors="replace", env=_environment())
    said = done.stdout + done.stderr
    found = sorted({path.name for path in finds.iterdir() if path.suffix != ".txt"} - before)
    if done.returncode and not found:  # libFuzzer writes the input of what ends it, so this is the fuzzer's own
        raise SystemExit(f"{reader.name}: the fuzzer ended with {done.returncode}\n{said[-4000:]}")
    return Run(
        inputs=_last(r"stat::number_of_executed_units:\s*(\d+)", said) or _last(r"#(\d+)\s", said),
        seconds=round(time.monotonic() - begun, 1),
        edges=_last(r"cov: (\d+)", said),
        corpus=_last(r"corp: (\d+)", said),
        finds=found,
    )


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120", "HF_HUB_OFFLINE": "1"}


def _last(pattern: str, text: str) -> int:
    found = re.findall(pattern, text)
    return int(found[-1]) if found else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--inputs", type=int, default=1_000_000, help="of each reader")
    parser.add_argument("--minutes", type=float, help="the most for each reader")
    parser.add_argument("--readers", type=str.split, default=list(READERS), metavar="NAMES", help="some of them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true", help="write a result file")
    args = parser.parse_args()
    if unknown := set(args.readers) - READERS.keys():
        parser.error(f"--readers: no {', '.join(sorted(unknown))}; there are {' '.join(READERS)}")
    runs: dict[str, Run] = {}
    for name in args.readers:
        runs[name] = run = fuzz(READERS[name], inputs=args.inputs, minutes=args.minutes, seed=args.seed)
        each = f"{run.inputs:,} inputs in {run.seconds:.0f} s, {run.edges:,} branches, {run.corpus:,} in the corpus"
        print(
            f"{name}: {each}", *(f"  FOUND {WORK / name / 'finds' / find}" for find in run.finds), sep="\n", flush=True
        )
        if args.write:
            path = write_result("fuzz", {"readers": {name: dataclasses.asdict(run) for name, run in runs.items()}})
    finds = sum(len(run.finds) for run in runs.values())
    print(f"{sum(run.inputs for run in runs.values()):,} inputs of {len(runs)} readers; {finds} finds")
    if args.write:
        print(f"Wrote {path}")
    return 1 if finds else 0


if __name__ == "__main__":
    sys.exit(main())
