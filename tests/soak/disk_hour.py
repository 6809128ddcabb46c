"""Trains for an hour with 20 GB a step through two scratch directories, of which one fails in every way, bit for bit.

    python -m tests.soak.disk_hour [--minutes 60] [--fault-every 3] [--seed 0] [--folder DIR] [--write]

Layers of element-wise operators save 1 GiB in each of 20 microbatches and compute little. All of it goes to disk, without a
host tier. The steps repeat two whose losses, gradients and weights were computed before without memo, layer by layer under
torch's checkpoint. A step under a fault has the same bits, or ends in the error that the fault may cause, with the failed
directory in its message. Then it runs again, by the same manager on what is left, and after that a new manager has both
directories. Exit 1 where anything else was found.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import os
import random
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import torch

from benchmarks.results import ROOT, commit, write_result

sys.path.insert(0, str(ROOT / "tests" / "support"))

from faulty_file import Faults

import memo
from memo.errors import MemoError
from memo.manager import Manager
from memo.swap.disk import DiskStore
from tests.soak.disk_faults import KINDS, SMALL, Kind
from tests.soak.disk_training import Training
from tests.soak.resources import Sample, sample, trends

BUDGET_BYTES = 5 << 28
SPARE_BYTES = 60 * 10**9
"""Free space that the run leaves on the file system."""
MOST_RSS_BYTES = 6 << 30
_ROOM = 1 << 20
"""Bytes of other files without a name, such as a captured output."""
_PIECES = 120
"""Writes of 4 MiB to a directory in a microbatch, and as many reads; the last layer's tensors do not move."""


class Hour:
    """State of one run."""

    def __init__(self, args: argparse.Namespace, folder: Path) -> None:
        self.args = args
        self.rows, self.finds, self._samples, self._round = list[Any](), list[str](), list[Any](), list[str]()
        self._commit, self._draw = commit(), random.Random(args.seed)
        self.folders = [folder / "drive-0", folder / "drive-1"]
        self._small = folder / SMALL
        for directory in (*self.folders, self._small):
            directory.mkdir()
        mount = ["mount", "-t", "tmpfs", "-o", "size=64m", "memo", self._small]
        self._mounted = not subprocess.run(mount, capture_output=True, check=False).returncode
        self._drives = {directory: Faults() for directory in (*self.folders, self._small)}
        options: dict[str, Any] = DiskStore.__init__.__kwdefaults__ or {}
        options["open_file"] = lambda directory: self._drives[directory].open(directory)
        self._moved = dict.fromkeys(("written_bytes", "read_bytes", "write_busy_s", "read_busy_s"), 0.0)
        self._training = Training(args.seed, args.microbatches)
        self._want = [self._training.run(turn, None) for turn in range(2)]
        self._held = self._sample()
        self._manager: Manager | None = None

    def go(self) -> None:
        """Runs steps until the time is over or five things were found."""
        try:
            end = time.monotonic() + 60 * self.args.minutes
            self._offload()
            while len(self.finds) < 5 and time.monotonic() < end:
                waited_s = self._wait_for_space()
                self._row(len(self.rows) % 2, waited_s)
        finally:
            self._close()
            if self._mounted:
                subprocess.run(["umount", self._small], check=True)

    def _wait_for_space(self) -> float:
        """Gives the scratch back while other programs leave less than SPARE_BYTES; returns the seconds waited."""
        began = time.monotonic()
        while self._free_bytes() < SPARE_BYTES + (0 if self._manager else BUDGET_BYTES):
            self._close()
            time.sleep(5)
        if self._manager is None:
            self._offload()
        return round(time.monotonic() - began, 1)

    def _free_bytes(self) -> int:
        volume = os.statvfs(self.folders[0])
        return volume.f_bavail * volume.f_frsize

    def _row(self, turn: int, waited_s: float) -> None:
        """Runs one step, under a fault or not, and writes what came of it."""
        row: dict[str, Any] = {"step": len(self.rows) + 1, "fault": None, "waited_for_space_s": waited_s}
        if row["step"] % self.args.fault_every == 0:
            self._round = self._round or self._draw.sample(list(KINDS), len(KINDS))
            row["fault"] = self._round.pop()
        began, before = time.monotonic(), self._total()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            row["outcome"] = self._clean(turn) if row["fault"] is None else self._disturbed(turn, row["fault"])
        row["warnings"] = sorted({str(one.message) for one in caught})
        row["seconds"] = round(time.monotonic() - began, 2)
        row |= {name: round(value - before[name], 2) for name, value in self._total().items()}
        self._samples.append(self._sample())
        row |= dataclasses.asdict(self._samples[-1]) | {"free_bytes": self._free_bytes()}
        if row["rss_bytes"] > MOST_RSS_BYTES:
            self.finds.append(f"step {row['step']}: {row['rss_bytes']} bytes resident")
        self.rows.append(row)
        print(json.dumps(row), flush=True)
        if self.args.write:
            write_result("disk-hour", self.body())

    def _clean(self, turn: int) -> str:
        """Runs a step and compares it bit for bit."""
        got = self._training.run(turn, self._manager)
        if got != self._want[turn]:
            self.finds.append(f"step {len(self.rows) + 1}: {got} instead of {self._want[turn]}")
        return "equal" if got == self._want[turn] else "other bits"

    def _disturbed(self, turn: int, name: str) -> str:
        """Runs a step under a fault, after an error again; then a new manager has both directories."""
        kind, lost, outcome = KINDS[name], self._drives[self.folders[1]], []
        if kind.option == {"disk": SMALL} and not self._mounted:
            return self._clean(turn) + "; no file system can be mounted here"
        places = self._inject(kind)
        try:
            if kind.option is not None:
                self._close()
                self._offload(**{key: self._named(value) for key, value in kind.option.items()})
            outcome.append(self._clean(turn))
            failed: tuple[type[MemoError], ...] = ()
        except MemoError as error:
            outcome.append(f"{type(error).__name__}: {error}")
            failed = (type(error),)
            if not any(str(place) in str(error) for place in places):
                self.finds.append(f"{name}: no directory of {places} in {error}")
        if bool(failed) != bool(kind.errors) or not set(failed) <= set(kind.errors):
            self.finds.append(f"{name}: {outcome[0]}")
        if kind.first and not lost.hits:
            self.finds.append(f"{name}: no operation met it")
        if kind.first and (failed or kind.leaves_out):
            self._let_go(name)
            if kind.both:
                self._repair()
            calls = lost.calls.copy()
            outcome.append(f"again by the same manager: {self._clean(turn)}")
            if lost.calls != calls and kind.leaves_out:
                self.finds.append(f"{name}: the failed directory was used again")
        self._close()
        self._repair()
        left, held = [path for folder in self.folders for path in folder.iterdir()], self._sample()
        if left or held.disk_bytes - self._held.disk_bytes > _ROOM or held.descriptors != self._held.descriptors:
            self.finds.append(f"{name}: left behind {left}, {held}")
        self._offload()
        if failed and not kind.first:
            outcome.append(f"again by a new manager: {self._clean(turn)}")
        return "; ".join(outcome)

    def _let_go(self, name: str) -> None:
        """Waits until nothing of a step that failed is held: torch keeps its graph until the next backward."""
        torch.ones((), requires_grad=True).backward()
        assert self._manager is not None
        end = time.perf_counter() + 30
        while self._manager.stats.live_entries and time.perf_counter() < end:
            gc.collect()
            time.sleep(0.1)
        time.sleep(1)  # reads that were under way are repeated twice
        if self._manager.stats.live_entries:
            self.finds.append(f"{name}: {self._manager.stats.live_entries} storages of the failed step are held")

    def _inject(self, kind: Kind) -> list[Path]:
        """Arms the fault at a drawn operation; returns the directories of which the error names one."""
        begun = self._draw.randrange(self.args.microbatches - 3) * _PIECES + 1
        within = self._draw.randrange(_PIECES // 4, _PIECES)
        folders = self.folders if kind.both else self.folders[1:]
        for drive in (self._drives[folder] for folder in folders):
            for operation, later in kind.first.items():
                op: Any = operation
                first = begun if later is None else begun + within + later * _PIECES
                drive.fail(op, drive.calls[op] + first, **kind.given)
        return [self._small] if kind.option == {"disk": SMALL} else self.folders if kind.option else folders

    def _named(self, value: str) -> Any:
        return [self.folders[0], self._small] if value == SMALL else value

    def _repair(self) -> None:
        for drive in self._drives.values():
            drive.clear()
            drive.hits = 0

    def _offload(self, **option: Any) -> None:
        given = {"disk": self.folders, "disk_budget": BUDGET_BYTES, **option}
        self._manager = memo.offload(self._training.model, alpha=1.0, host=0, **given)

    def _close(self) -> None:
        self._moved, manager, self._manager = self._total(), self._manager, None
        if manager is not None:
            manager.close()

    def _total(self) -> dict[str, float]:
        """Bytes and busy seconds of all managers so far."""
        disk = None if self._manager is None else self._manager.report().disk
        return self._moved if disk is None else {name: n + getattr(disk, name) for name, n in self._moved.items()}

    def _sample(self) -> Sample:
        return sample(len(self.rows), self.folders[0])

    def body(self) -> dict[str, Any]:
        """For the result file; `finds` is empty where all was as it should be."""
        finds, body = list(self.finds), {"commit": self._commit, "minutes": self.args.minutes, "seed": self.args.seed}
        if len(self._samples) >= 8:
            found = trends(self._samples)
            body["trends"] = {name: dataclasses.asdict(trend) for name, trend in found.items()}
            finds += [f"{name} is not flat" for name, trend in found.items() if not trend.flat]
        faults = [row["fault"] for row in self.rows if row["fault"]]
        body |= {"steps": len(self.rows), "faults": {name: faults.count(name) for name in KINDS}}
        return body | {"totals": self._total(), "finds": finds, "rows": self.rows}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.soak.disk_hour", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--microbatches", type=int, default=20, help="of 1 GiB; 4 at least")
    parser.add_argument("--fault-every", type=int, default=3, metavar="STEPS")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folder", type=Path, help="on the disk to use (default: the temporary directory)")
    parser.add_argument("--write", action="store_true", help="write a result file, anew after each step")
    args = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="memo-disk-hour-", dir=args.folder) as folder:
        hour = Hour(args, Path(folder))
        hour.go()
    body = hour.body()
    print(json.dumps({name: value for name, value in body.items() if name != "rows"}, indent=1))
    return 1 if body["finds"] else 0


if __name__ == "__main__":
    sys.exit(main())
