"""Files made to harm: each ends its command with one inert line and exit code 1, within seconds and bounded memory.

Every command that reads a file is given every attack, in a process of its own under hard limits: six seconds of processor
time and a GiB of memory more than the command takes to refuse an empty file.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import json
import os
import resource
import struct
import sys
import threading
import zlib
from pathlib import Path

import pytest

from memo.cli.main import main
from memo.errors import ExitCode

MIB = 1 << 20
DEEP = "[" * (MIB // 2) + "]" * (MIB // 2)
ESCAPES = "\x1b[2J\x1b]0;owned\x07\x1b]8;;http://x\x1b\\ \u202e"
HTML = "<script>canary()</script>"


def _repeated(item: str) -> str:
    return ",".join([item] * (MIB // (len(item) + 1)))


ATTACKS: dict[str, bytes] = {
    "nothing": b"",
    "spaces": b" " * MIB,
    "zeros": b"\0" * MIB,
    "another encoding": '{"format": "memo-trace"}'.encode("utf-16"),
    "latin-1": '{"format": "mémo"}'.encode("latin-1"),
    "a byte order mark twice": b"\xef\xbb\xbf\xef\xbb\xbf{}",
    "deep lists": DEEP.encode(),
    "deep objects": b'{"a":' * (MIB // 5),
    "a deep key": b'{"format":' + DEEP.encode() + b"}",
    "an infinite number": b'{"version": 1e400}',
    "NaN": b'{"version": NaN}',
    "minus infinity": b'{"version": -Infinity}',
    "many digits": b'{"version": ' + b"9" * MIB + b"}",
    "many long numbers": ('{"version": [' + _repeated("9" * 4000) + "]}").encode(),
    "many digits behind the point": b'{"version": 0.' + b"9" * MIB + b"}",
    "many empty lists": ('{"layers": [' + _repeated("[]") + "]}").encode(),
    "many empty objects": ('{"kinds": [' + _repeated("{}") + "]}").encode(),
    "many keys": json.dumps({str(number): 0 for number in range(90_000)}).encode(),
    "many keys, the last one twice": (json.dumps({str(n): 0 for n in range(90_000)})[:-1] + ', "89999": 1}').encode(),
    "a long text": b'{"format": "' + b"x" * MIB + b'"}',
    "an escape in a key": json.dumps({ESCAPES: 1, "format": ESCAPES}).encode(),
    "raw escapes": f'{{"format": "{ESCAPES}"}}\n'.encode(),
    "escapes outside of JSON": (ESCAPES * 10).encode(),
    "half of a character": b'{"format": "\\ud800"}',
    "a path": json.dumps({"format": "../../../../etc/passwd", "model_type": "/etc/passwd"}).encode(),
    "commas": b"," * MIB,
    "quotes": b'"' * MIB,
    "newlines": b"\n" * MIB,
    "a header of commas": b"id,lower,upper,size\n" + b"," * MIB,
    "a quoted megabyte": b'id,lower,upper,size\n"' + b"x" * MIB + b'",0,1,5',
    "an open quote": b'id,lower,upper,size\n"a,0,1,5\n' * 9,
    "gzip of zeros": zlib.compress(b"\0" * (64 * MIB), wbits=31),
    "a pickle that names a function": b"cos\nsystem\n(S'echo owned > owned'\ntR.",
    "a protocol 4 pickle that names one": b"\x80\x04" + b"\x8c\x02os\x8c\x06system\x93\x8c\x10echo owned >owned\x85R.",
    "a pickle's memo of 2^31 entries": b"\x80\x02]r\xff\xff\xff\x7f.",
    "a pickle's text of 2^62 bytes": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 62) + b"x.",
    "a pickle's bytes of 2^34": b"\x80\x05\x96" + struct.pack("<Q", 1 << 34) + b"x.",
    "a pickle that doubles": b"\x80\x02](h\x00" + b"".join(b"]q" + bytes([n]) for n in range(9)) + b".",
    "a deep pickle": b"\x80\x02" + b"]" * MIB + b"a" * (MIB - 1) + b".",
    "a deep tuple as a key": b"\x80\x02}" + b")" + b"\x85" * MIB + b"K\x01s.",
    "a model of 10^9 labels": b'{"model_type": "llama", "num_labels": 1000000000}',
    "a model of 10^9 layers": b'{"model_type": "gemma3", "text_config": {"num_hidden_layers": 1000000000}}',
    "an archive": b"PK\x03\x04" + b"\0" * 100,
    "an HTML page": f"<!doctype html><title>{HTML}</title>".encode(),
}
"""By name, the bytes of a file of about a MiB at most."""

COMMANDS = {
    "show": "show {}",
    "check": "check {} --json",
    "pack": "pack {} --time-limit 1s",
    "simulate": "simulate {}",
    "trace stats": "trace stats {}",
    "trace html": "trace html {} -o page.html",
    "trace chrome": "trace chrome {} -o chrome.json",
    "trace diff": "trace diff {} {}",
    "explain-oom": "explain-oom {}",
    "plan --model": "plan --model {} --seq 1k --gpu h100",
    "plan --profile": "plan --profile {} --gpu h100",
    "plan --gpu": "plan --model tiny --seq 1k --gpu {}",
    "plan --doctor": "plan --model tiny --seq 1k --gpu h100 --doctor {}",
    "plan --cluster": "plan --model tiny --seq 1k --cluster {}",
    "train --tokenizer": "train --model tiny --steps 1 --seq 16 --data text.txt --tokenizer {}",
    "train --resume": "train --model tiny --steps 1 --seq 16 --data text.txt --resume step-00000001",
    "train --plan": "train --model tiny --steps 1 --seq 16 --data text.txt --offload auto --plan {}",
}
NAMES = {"plan --model": "config.json", "plan --gpu": "gpu.json", "train --resume": "step-00000001/meta.json"}
TRACE = '{"format": "memo-trace", "version": 1, "rank": 0, "world_size": 1, "origin_unix_ns": 5, "meta": {}}\n'
REFUSED = (ExitCode.FAILURE, ExitCode.USAGE)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "trace.jsonl").write_text(TRACE)
    (tmp_path / "text.txt").write_text("some words " * 100)
    (tmp_path / "step-00000001").mkdir()
    return tmp_path


def refused(command: str, path: Path, *, room: int = 1 << 30, seconds: int = 6) -> tuple[int, str]:
    """Exit code and standard error of a command, run in a fork under limits; what it printed must be inert."""
    arguments = [word.format(path) for word in COMMANDS[command].split()]
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:  # the child: torch and memo are imported already, which the limits leave out
        try:
            faulthandler.disable()  # pytest's, of which the command knows nothing
            os.close(read)
            for number in (1, 2):
                os.dup2(write, number)
            sys.stdout, sys.stderr = (open(number, "w", encoding="utf-8", closefd=False) for number in (1, 2))  # noqa: SIM115
            spent = sum(os.times()[:2])
            resource.setrlimit(resource.RLIMIT_CPU, (int(spent) + seconds + 1, int(spent) + seconds + 1))
            size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (size + room, size + room))
            code = main(arguments)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        except BaseException:
            import traceback

            traceback.print_exc()
            sys.stderr.flush()
            os._exit(99)
    os.close(write)
    with open(read, encoding="utf-8") as said:
        text = said.read()
    status = os.waitpid(pid, 0)[1]
    return os.waitstatus_to_exitcode(status), text


@pytest.fixture(scope="module", autouse=True)
def _imported(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What commands import on first use is no part of what a file costs."""
    here = tmp_path_factory.mktemp("imports")
    import memo.cli.train
    import memo.gpt.train.run  # noqa: F401

    (here / "config.json").write_text('{"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 64}')
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        for command in COMMANDS.values():
            if "train" not in command:
                main([word.format(here / "config.json") for word in command.split()])


def assert_inert(text: str, *, where: str) -> None:
    acting = sorted({char for char in text if not char.isprintable()} - {"\n"})
    assert not acting, f"{where}: {acting!r} reached the terminal"


@pytest.mark.parametrize("command", COMMANDS)
def test_each_attack_on_each_command_is_one_line(command: str, folder: Path) -> None:
    for name, content in ATTACKS.items():
        path = folder / NAMES.get(command, "given.json")
        path.write_bytes(content)
        code, text = refused(command, path)
        assert code in REFUSED, f"{name}: exit code {code}\n{text[-2000:]}"
        assert text.count("\n") == 1, f"{name}:\n{text[-2000:]}"
        assert text.startswith("memo "), name
        assert len(text) < 4000, name
        assert_inert(text, where=name)
        assert not (folder / "owned").exists(), name


@pytest.mark.parametrize("command", COMMANDS)
def test_a_device_and_a_pipe_that_nobody_writes_to_are_refused_at_once(command: str, folder: Path) -> None:
    for kind in ("/dev/zero", "/dev/urandom", "/dev/full", "fifo", "loop", "folder", "missing", "link to /dev/zero"):
        path = folder / NAMES.get(command, "given.json")
        with contextlib.suppress(FileNotFoundError):
            path.unlink() if not path.is_dir() or path.is_symlink() else path.rmdir()
        if kind == "fifo":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()
        elif kind == "loop":
            path.symlink_to(path.name)
        elif kind != "missing":
            path.symlink_to(kind.removeprefix("link to "))
        done: list[tuple[int, str]] = []
        thread = threading.Thread(target=lambda path=path, done=done: done.append(refused(command, path)), daemon=True)
        thread.start()
        thread.join(60)
        assert done, f"{kind}: it waits"
        code, text = done[0]
        assert code in REFUSED, f"{kind}: exit code {code}\n{text[-2000:]}"
        assert text.count("\n") == 1, f"{kind}:\n{text[-2000:]}"
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
