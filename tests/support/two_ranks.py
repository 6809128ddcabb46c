"""Starts a worker on two ranks, once for all that it is to compare: most of a launch is imports."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from ready_ranks import run_ranks


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What came of it."""

    ended: int
    said: str
    left: list[str]
    """In the scratch directory."""


def launched(worker: Path, kinds: Sequence[str], scratch: Path) -> Launch:
    """Runs `worker` over `kinds`, up to the first that fails."""
    done = run_ranks(2, worker, scratch, *kinds, timeout=100 * len(kinds))
    return Launch(
        ended=done.returncode,
        said=done.stdout + done.stderr,
        left=[path.name for path in scratch.iterdir()],
    )
