"""Ranks of one job as torchrun starts them, but forked from an interpreter that has its imports behind it.

Like torchrun it serves the store at which they meet, and ends the others once one fails. A test whose promise is about
torchrun itself starts torchrun.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Sequence
from typing import Any

import ready_python
import torch.distributed as dist


def run_ranks(count: int, *arguments: object, timeout: float) -> subprocess.CompletedProcess[str]:
    """What they said, one rank after the other, first what they printed; the first exit code that is not 0."""
    kind: Any = dist.TCPStore  # type: ignore[attr-defined]
    store = kind("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    programs = [ready_python.start(*arguments, env=_environment(rank, count, store.port)) for rank in range(count)]
    code = _end_of(programs, time.monotonic() + timeout)
    said = [program.communicate() for program in programs]
    return subprocess.CompletedProcess(
        programs[0].args, code, "".join(out for out, _ in said), "".join(errors for _, errors in said)
    )


def _environment(rank: int, count: int, port: int) -> dict[str, str]:
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count, "GROUP_RANK": 0}
    restarts = {"TORCHELASTIC_RESTART_COUNT": 0, "TORCHELASTIC_MAX_RESTARTS": 0}
    met = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
    return {**os.environ, **{name: str(value) for name, value in (numbers | restarts | met).items()}}


def _end_of(programs: Sequence[ready_python.Program], deadline: float) -> int:
    """Waits until all have ended well or one has not, which is 0 or its exit code; kills what then still runs."""
    try:
        while True:
            codes = [program.poll() for program in programs]
            if any(codes) or None not in codes:
                return next(filter(None, codes), 0)
            if time.monotonic() > deadline:
                raise TimeoutError(f"{programs[0].args} took too long")
            time.sleep(0.01)
    finally:
        for program in programs:
            program.kill()
            program.wait()
