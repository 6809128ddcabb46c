"""Restart of a rank in its own process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

PROGRAM = """
import os, sys
from memo.adapt import restart_rank
from memo.parallel import RESTARTS
print(sys.argv[1:], len(os.listdir("/proc/self/fd")))
if RESTARTS not in os.environ:
    for end in os.pipe():
        os.set_inheritable(end, True)  # as the sockets of gloo are
    restart_rank(trace=None)
"""


def test_a_restarted_rank_has_its_arguments_and_no_connection_of_before(tmp_path: Path) -> None:
    program = tmp_path / "rank.py"
    program.write_text(PROGRAM)
    environment = {**os.environ, "RANK": "0"}
    done = subprocess.run(
        [sys.executable, "-u", str(program), "--tp", "2"], capture_output=True, text=True, check=True, env=environment
    )
    first, second = done.stdout.splitlines()
    assert second == first.replace("'2']", "'2', '--resume']")
