"""Fuzzes every reader of files and texts, guided by coverage; each way to fail is kept as a file.

    python -m tests.fuzz [--inputs 1000000] [--minutes M] [--readers "trace cluster"] [--write] [--continue]

Each reader has a process of its own, for `--inputs` inputs or `--minutes` minutes, and a corpus under build/fuzz that the
next run begins with, as it does with that of corpus.tar.xz, which `--keep` writes. Finds go to build/fuzz/NAME/finds; kept
in tests/fuzz/found/NAME they are inputs of every run, and of the tests. With `--continue` inputs are added to those of the
latest result file, so that a million of each reader are reached in pieces; readers that take the least time for an input
come first. Exit 1 where anything was found.
"""

from __future__ import annotations

import argparse
import dataclasses
import math
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.results import ROOT, commit, newest_result, write_result

sys.path.insert(0, str(ROOT / "tests" / "support"))

from tests.fuzz.corpus import ARCHIVE, pack, unpacked
from tests.fuzz.readers import MOST_BYTES, READERS, Reader

FOUND = Path(__file__).parent / "found"
WORK = ROOT / "build" / "fuzz"
LONGEST = 1 << 16
"""Bytes of an input, as a rule; a file of a MiB is an attack of its own (tests/attacks)."""
STUCK_S = 20
"""An input that takes so long ends its reader's process: ten times what it may, as machines are shared."""


SLICE_M = 3.0
"""Minutes of one process: what is stopped loses no more."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Result of the runs of one reader."""

    inputs: int
    """Number of inputs run; those of its corpus at the start are not counted again."""
    seconds: float
    edges: int
    """Branches of memo's code that the last one reached."""
    corpus: int
    """Inputs that each reached something new."""
    finds: list[str]

    def after(self, before: Run | None) -> Run:
        """The sums of this run and the one before it."""
        if before is None:
            return self
        seconds = round(before.seconds + self.seconds, 1)
        finds = [*before.finds, *self.finds]
        return dataclasses.replace(self, inputs=before.inputs + self.inputs, seconds=seconds, finds=finds)


def fuzz(reader: Reader, *, inputs: int, minutes: float | None, seed: int = 0, work: Path = WORK) -> Run:
    """Fuzzes one reader in a process of its own."""
    corpus, finds = work / reader.name / "corpus", work / reader.name / "finds"
    for folder in (corpus, finds):
        folder.mkdir(parents=True, exist_ok=True)
    for number, given in enumerate([*reader.seeds(), *unpacked().get(reader.name, [])]):
        (corpus / f"seed-{number}").write_bytes(given)
    kept = FOUND / reader.name
    known = len([*corpus.iterdir()])
    flags = [
        f"-runs={inputs + known}",
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
    done = _run(reader.name, finds, flags)
    said = done.stdout + done.stderr
    found = sorted({path.name for path in finds.iterdir() if path.suffix != ".txt"} - before)
    if done.returncode and not found:  # libFuzzer writes the input of what ends it, so this is the fuzzer's own
        raise SystemExit(f"{reader.name}: the fuzzer ended with {done.returncode}\n{said[-4000:]}")
    given = _last(r"stat::number_of_executed_units:\s*(\d+)", said) or _last(r"#(\d+)\s", said)
    return Run(
        inputs=max(0, given - known),
        seconds=round(time.monotonic() - begun, 1),
        edges=_last(r"cov: (\d+)", said),
        corpus=_last(r"corp: (\d+)", said),
        finds=found,
    )


def keep(work: Path = WORK) -> int:
    """Packs the corpora, each without inputs that others of it stand for; returns the number of inputs."""
    kept = unpacked()
    for name in READERS:
        if (corpus := work / name / "corpus").is_dir():
            with tempfile.TemporaryDirectory() as merged:
                _run(name, work / name / "finds", ["-merge=1", merged, str(corpus)]).check_returncode()
                kept[name] = [path.read_bytes() for path in Path(merged).iterdir()]
    pack(kept)
    return sum(map(len, kept.values()))


def _run(name: str, finds: Path, flags: Sequence[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.fuzz.one_reader", name, str(finds), *flags]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, errors="replace", env=_environment())


def _environment() -> dict[str, str]:
    """With a size and a language, which argparse looks for at each option of a command otherwise."""
    fixed = {"COLUMNS": "120", "LINES": "40", "LANGUAGE": "C"}
    return {**os.environ, **fixed, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def _last(pattern: str, text: str) -> int:
    found = re.findall(pattern, text)
    return int(found[-1]) if found else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--inputs", type=int, default=1_000_000, help="of each reader, earlier pieces among them")
    parser.add_argument("--continue", action="store_true", dest="go_on", help="add to the latest result file's figures")
    parser.add_argument("--minutes", type=float, help="the most for each reader")
    parser.add_argument("--readers", type=str.split, default=list(READERS), metavar="NAMES", help="some of them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--write", action="store_true", help="write a result file")
    parser.add_argument("--keep", action="store_true", help="pack the corpora that are there, and run nothing")
    args = parser.parse_args()
    if args.keep:
        print(f"{keep():,} inputs in {ARCHIVE.relative_to(ROOT)}")
        return 0
    if unknown := set(args.readers) - READERS.keys():
        parser.error(f"--readers: no {', '.join(sorted(unknown))}; there are {' '.join(READERS)}")
    earlier = newest_result("fuzz") if args.go_on else None
    runs = {name: Run(**run) for name, run in earlier["readers"].items()} if earlier else {}
    pieces: list[dict[str, Any]] = list(earlier["pieces"]) if earlier else []
    pieces.append({"commit": commit(), "inputs": {}})
    found, path = 0, None
    for name in sorted(args.readers, key=lambda name: _seconds_each(runs.get(name))):
        for run in _slices(READERS[name], runs.get(name), args):
            found += len(run.finds)
            runs[name] = total = run.after(runs.get(name))
            pieces[-1]["inputs"][name] = pieces[-1]["inputs"].get(name, 0) + run.inputs
            each = f"{total.inputs:,} inputs in {total.seconds:.0f} s, {run.edges:,} branches, {run.corpus:,} in the corpus"
            finds = (f"  FOUND {WORK / name / 'finds' / find}" for find in run.finds)
            print(f"{name}: {each}", *finds, sep="\n", flush=True)
            if args.write:
                ordered = {name: dataclasses.asdict(runs[name]) for name in READERS if name in runs}
                path = write_result("fuzz", {"readers": ordered, "pieces": pieces})
    print(f"{sum(run.inputs for run in runs.values()):,} inputs of {len(runs)} readers; {found} finds")
    if path is not None:
        print(f"Wrote {path}")
    return 1 if found else 0


def _seconds_each(run: Run | None) -> float:
    """Time of an input; readers that have not run come last."""
    return run.seconds / run.inputs if run is not None and run.inputs else math.inf


def _slices(reader: Reader, before: Run | None, args: argparse.Namespace) -> Iterator[Run]:
    """Runs of a reader until it has had all its inputs or its time."""
    inputs = 0 if before is None else before.inputs
    begun = time.monotonic()
    while inputs < args.inputs:
        left = math.inf if args.minutes is None else args.minutes - (time.monotonic() - begun) / 60
        if left <= 0:
            break
        run = fuzz(reader, inputs=args.inputs - inputs, minutes=min(left, SLICE_M), seed=args.seed + inputs)
        yield run
        inputs += run.inputs
        if not run.inputs:
            break


if __name__ == "__main__":
    sys.exit(main())
