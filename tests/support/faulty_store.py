"""Disk stores over files that fail as told, and programs that run one of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import torch
from faulty_file import Faults

from memo.swap import aligned_empty
from memo.swap.disk import DiskStore

KIB = 1 << 10
BLOCK = 16 * KIB
SIZE = 4 * BLOCK + 1000  # five pieces, the last with a tail


def random_bytes(nbytes: int, seed: int = 0) -> torch.Tensor:
    return aligned_empty(nbytes).random_(0, 256, generator=torch.Generator().manual_seed(seed))


def make(directory: Path, faults: Faults, *, verify: bool = False, threads: int = 2) -> DiskStore:
    return DiskStore([directory], 1 << 20, block_bytes=BLOCK, threads=threads, verify=verify, open_file=faults.open)


def round_trip(store: DiskStore, seed: int = 0) -> None:
    """Writes, reads and compares; raises what the store raises."""
    source, target = random_bytes(SIZE, seed), aligned_empty(SIZE)
    extent = store.reserve(SIZE)
    assert extent is not None
    try:
        store.write(extent, source).synchronize()
        store.read(extent, target).synchronize()
        assert torch.equal(source, target)
        assert torch.equal(source, random_bytes(SIZE, seed)), "a source is never touched"
    finally:
        store.release(extent)


def python(code: str, *args: object) -> subprocess.CompletedProcess[str]:
    program = "import sys, os, torch\nfrom memo.swap.disk.store import DiskStore\n" + textwrap.dedent(code)
    return subprocess.run(
        [sys.executable, "-c", program, *map(str, args)],
        capture_output=True,
        text=True,
        timeout=60,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
