"""Python programs as processes of their own, forked from an interpreter that has imported torch and memo already.

The imports are most of what a short program takes. The interpreter imports, and does nothing else: no thread, no random
number. A program has the arguments, environment, folder, files and signals that `subprocess` would give it, and ends as
an interpreter ends. A test whose promise is about a program's imports or memory starts one of its own.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import json
import os
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

IMPORTED = (
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "memo",
    "memo.cli.train",
    "memo.gpt.train.parallel_run",
    "memo.gpt.train.run",
)


class Program:
    """A program that was started; of `subprocess.Popen` what tests use."""

    def __init__(self, arguments: Sequence[object], *, env: Mapping[str, str] | None, cwd: Path | None) -> None:
        self.args = [str(argument) for argument in arguments]
        self.returncode: int | None = None
        self._said: list[str] = []
        self._out, self._errors = (tempfile.TemporaryFile() for _ in range(2))  # noqa: SIM115  closed by poll
        self._ended, told = socket.socketpair()
        request = {
            "arguments": self.args,
            "env": dict(os.environ if env is None else env),
            "cwd": str(cwd or Path.cwd()),
        }
        with told, open(os.devnull, "rb") as nothing:
            files = [nothing.fileno(), self._out.fileno(), self._errors.fileno(), told.fileno()]
            _ask(_interpreter(), json.dumps(request).encode(), files)
        (self.pid,) = struct.unpack("i", self._ended.recv(4))

    def poll(self) -> int | None:
        """The exit code, once it has ended; the negative of a signal that ended it."""
        if self.returncode is None and select.select([self._ended], [], [], 0)[0]:
            (self.returncode,) = struct.unpack("i", self._ended.recv(4))
            self._ended.close()
            for file in (self._out, self._errors):
                with file:
                    file.seek(0)
                    self._said.append(file.read().decode())
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        deadline = None if timeout is None else time.monotonic() + timeout
        while self.poll() is None:
            left = None if deadline is None else max(deadline - time.monotonic(), 0)
            if not select.select([self._ended], [], [], left)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """All that it has said, out and as errors, at its end."""
        self.wait(timeout)
        out, errors = self._said
        return out, errors

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start(*arguments: object, env: Mapping[str, str] | None = None, cwd: Path | None = None) -> Program:
    """Starts what `python` would with these arguments: `-c` and a program, `-m` and a module, or a script; and its own."""
    return Program(arguments, env=env, cwd=cwd)


def run(
    *arguments: object, env: Mapping[str, str] | None = None, cwd: Path | None = None, timeout: float = 240
) -> subprocess.CompletedProcess[str]:
    """Starts it and waits for its end; kills it where that takes too long."""
    program = start(*arguments, env=env, cwd=cwd)
    try:
        out, errors = program.communicate(timeout)
    except BaseException:
        program.kill()
        program.wait()
        raise
    assert program.returncode is not None
    return subprocess.CompletedProcess(program.args, program.returncode, out, errors)


@functools.cache
def _interpreter() -> socket.socket:
    """To the interpreter, which ends when this process does."""
    ours, its = socket.socketpair()
    with its:
        process = subprocess.Popen([sys.executable, __file__, str(its.fileno())], pass_fds=[its.fileno()])

    @atexit.register
    def end() -> None:
        ours.close()
        process.wait()

    return ours


def _ask(channel: socket.socket, request: bytes, files: Sequence[int]) -> None:
    socket.send_fds(channel, [struct.pack("i", len(request))], list(files))
    channel.sendall(request)


# What follows runs in the interpreter, and at the end of it in each program.


def _serve(channel: socket.socket) -> dict[str, Any] | None:
    """Forks a program for each request. Returns in the program, with its request; None once nobody can ask any more."""
    signal.signal(signal.SIGCHLD, _forget_ended)
    while True:
        head, files, _, _ = socket.recv_fds(channel, 4, 4)
        if not head:
            return None
        request = json.loads(channel.recv(*struct.unpack("i", head), socket.MSG_WAITALL))
        if os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            channel.close()
            _keep(files)
            return dict(request)
        for file in files:
            os.close(file)


def _forget_ended(*_: object) -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG) != (0, 0):
            pass


def _keep(files: Sequence[int]) -> None:
    """Forks the program and returns in it; else tells its id, waits for it and tells how it ended."""
    told = files[3]
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # what runs after a fork ignores its KeyboardInterrupt
    program = os.fork()
    if program == 0:
        for number, file in enumerate(files[:3]):
            os.dup2(file, number)
        for file in files:
            os.close(file)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        return
    os.write(told, struct.pack("i", program))
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _, status = os.waitpid(program, 0)
    with contextlib.suppress(BrokenPipeError):  # whoever asked has ended
        os.write(told, struct.pack("i", os.waitstatus_to_exitcode(status)))
    os._exit(0)


def _become(request: dict[str, Any]) -> None:
    """Goes on as the program."""
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    match request["arguments"]:
        case ["-c", program, *rest]:
            sys.argv = ["-c", *rest]
            sys.path[0] = ""
            exec(compile(program, "<string>", "exec"), {"__name__": "__main__"})
        case ["-m", module, *rest]:
            sys.argv = [module, *rest]
            sys.path[0] = request["cwd"]
            sys.modules.pop(module, None)
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        case [script, *rest]:
            sys.argv = [script, *rest]
            sys.path[0] = str(Path(script).parent)
            runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin with it ignored
    for name in IMPORTED:
        __import__(name)
    gc.freeze()  # what is imported is not looked through again at each end
    asked = _serve(socket.socket(fileno=int(sys.argv[1])))
    if asked is not None:
        _become(asked)
