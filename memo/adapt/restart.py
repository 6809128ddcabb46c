"""Restart of a rank in place: its process executes the same command anew, as the process that torchrun knows.

    all ranks     checkpoint on disk, process group and files closed
    each rank     executes the command with --resume; its id, its output and torchrun's variables stay
    together      meet at torchrun's store, under keys of their own (memo.parallel.store)

A rank that does not come back ends the job as any rank that fails. If torchrun itself restarts ranks later, with --resume,
they go on in the layout of the newest checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import NoReturn

from memo.parallel import RESTARTS
from memo.trace import trace_path

_STANDARD_ERROR = 2


def restart_rank(*, trace: str | Path | None) -> NoReturn:
    """Executes this process's command again, with --resume; what is not closed is lost, connections of torch and gloo too.

    Args:
        trace: the run's trace, if any; renamed to `until-restartN....`, so that the next one does not overwrite it.
    """
    number = int(os.environ.get(RESTARTS, "0")) + 1
    if trace is not None:
        path = trace_path(Path(trace), rank=int(os.environ["RANK"]))
        path.rename(path.with_name(f"until-restart{number}.{path.name}"))
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own
            os.set_inheritable(int(name), int(name) <= _STANDARD_ERROR)
    sys.stdout.flush()
    sys.stderr.flush()
    command = [sys.executable, *sys.orig_argv[1:], "--resume"]
    os.execve(sys.executable, command, {**os.environ, RESTARTS: str(number)})
