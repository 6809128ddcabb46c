"""Programs that tests fork from a ready interpreter are processes as `subprocess` starts them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import ready_python

PROGRAMS = {
    "what it is given": "import os, sys; print(sys.argv, os.getcwd(), os.environ['GIVEN'], sys.stdin.read(), __name__)",
    "no file but its own": "import os; print(sorted(os.listdir('/proc/self/fd')))",
    "one thread": "import os; print(os.listdir('/proc/self/task') == [str(os.getpid())])",
    "both streams": "import sys; print('said'); print('and wrong', file=sys.stderr); sys.exit(7)",
    "words as exit code": "import sys; sys.exit('no such thing')",
    "its end": "import atexit; atexit.register(print, 'last'); print('first')",
    "a signal": "import os, signal; os.kill(os.getpid(), signal.SIGTERM)",
    "default signals": "from signal import *; print(getsignal(SIGCHLD), getsignal(SIGTERM), getsignal(SIGPIPE))",
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_is_as_an_interpreter_runs_it(name: str, tmp_path: Path) -> None:
    arguments, env = ["-c", PROGRAMS[name], "one", "two words"], {**os.environ, "GIVEN": "word"}
    alone = subprocess.run(
        [sys.executable, *arguments],
        stdin=subprocess.DEVNULL, capture_output=True, text=True, env=env, cwd=tmp_path, check=False,
    )  # fmt: skip
    forked = ready_python.run(*arguments, env=env, cwd=tmp_path)
    assert (forked.returncode, forked.stdout, forked.stderr) == (alone.returncode, alone.stdout, alone.stderr)


def test_an_exception_ends_it_with_a_traceback() -> None:
    done = ready_python.run("-c", "1 / 0")
    assert done.returncode == 1
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")


def test_it_can_be_interrupted_and_killed_and_others_go_on() -> None:
    sleeping = "import time; print('begun', flush=True); time.sleep(100)"
    interrupted, killed, other = (ready_python.start("-c", sleeping) for _ in range(3))
    killed.kill()
    assert killed.wait(60) == -signal.SIGKILL
    interrupted.send_signal(signal.SIGINT)
    assert interrupted.wait(60) == -signal.SIGINT
    assert other.poll() is None
    other.terminate()
    assert other.wait(60) == -signal.SIGTERM


def test_what_takes_too_long_is_killed() -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        ready_python.run("-c", "import time; time.sleep(100)", timeout=0.5)
