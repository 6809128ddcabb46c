"""Names made to harm, in files that are otherwise well formed: they reach no terminal and no page as they are."""

from __future__ import annotations

import contextlib
import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from memo.cli.main import main
from memo.errors import ExitCode, TraceError
from memo.trace.decode_event import decode_event
from tests.fuzz.readers import READERS

ESCAPES = "\x1b[2J\x1b]0;owned\x07\x1b]8;;http://x\x1b\\\u202e\u200b\x9b31m\r\n\t"
HTML = "</script><script>canary()</script><img src=x onerror=canary()>"
MARKUP = "[bold red]x[/] [link=http://x]y[/link] [/nothing]"
NAMES = {"escapes": ESCAPES, "HTML": HTML, "markup": MARKUP, "a long name": "n" * 900}


def _named(value: Any, name: str) -> Any:
    """The document with `name` at the end of every text that may be any text."""
    if isinstance(value, dict):
        return {key: _named(inner, name) if key not in _FIXED else inner for key, inner in value.items()}
    if isinstance(value, list):
        return [_named(inner, name) for inner in value]
    return value + name if isinstance(value, str) else value


_FIXED = frozenset(["format", "state", "status", "kind", "schedule", "action", "role", "dtype", "point", "points"])


def _seed(reader: str, number: int = 0) -> Any:
    return json.loads(READERS[reader].seeds()[number])


def _lines(name: str) -> str:
    """A trace with `name` at the end of every text that its format leaves free."""
    header, *events, end = (json.loads(line) for line in READERS["trace"].seeds()[0].decode().splitlines())
    header["meta"] = _named(header["meta"], name)
    named = []
    for event in events:
        for key, text in event.items():
            changed = {**event, key: f"{text}{name}"}
            with contextlib.suppress(TraceError):
                decode_event(dict(changed))
                event = changed
        named.append(event)
    return "\n".join(map(json.dumps, (header, *named, end))) + "\n"


def _plan(reader: str, name: str) -> str:
    return json.dumps(_named(_seed(reader), name))


FILES: dict[str, tuple[Callable[[str], str | bytes], tuple[str, ...]]] = {
    "plan.json": (
        lambda name: _plan("activation-plan", name),
        ("show {}", "show {} --json", "check {}", "simulate {}", "simulate {} --json"),
    ),
    "addresses.json": (
        lambda name: _plan("address-plan", name),
        (
            "show {}",
            "check {}",
            "pack {} --time-limit 1s --plot {page} -f",
        ),
    ),
    "buffers.json": (lambda name: json.dumps(_named(_seed("address-problem"), name)), ("pack {} --time-limit 1s",)),
    "trace.jsonl": (
        _lines,
        (
            "trace stats {}",
            "trace diff {} {}",
            "trace html {} -f -o {page}",
            "trace diff {} {} -f -o {page}",
            "explain-oom {}",
        ),
    ),
    "s.pickle": (
        lambda name: pickle.dumps(_framed(_seed("snapshot"), name)),
        ("explain-oom {}", "explain-oom {} --json"),
    ),
    "config.json": (lambda name: json.dumps({"model_type": f"x{name}"}), ("plan --model {} --seq 1k --gpu h100",)),
    "machine.json": (
        lambda name: json.dumps(_named(_seed("hardware"), name)),
        ("plan --model tiny --seq 1k --gpu {}", "simulate plain.json --hardware {}"),
    ),
    "cluster.json": (
        lambda name: json.dumps(_clustered(_seed("cluster"), name)),
        ("plan --model tiny --seq 1k --cluster {}",),
    ),
}


def _framed(snapshot: Any, name: str) -> Any:
    for segment in snapshot["segments"]:
        for block in segment["blocks"]:
            block["frames"] = [{"name": f"f{name}", "filename": f"m{name}.py", "line": 1}]
    return snapshot


def _clustered(cluster: Any, name: str) -> Any:
    for group in cluster["groups"]:
        group["name"] += name
    for link in cluster.get("links", ()):
        link["between"] = [f"{one}{name}" for one in link["between"]]
    return cluster


@pytest.mark.parametrize("name", NAMES.values(), ids=NAMES)
@pytest.mark.parametrize("file", FILES)
def test_names_act_on_no_terminal_and_in_no_page(
    file: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    Path("trace.jsonl").write_bytes(READERS["trace"].seeds()[0])
    Path("plain.json").write_bytes(READERS["activation-plan"].seeds()[0])
    made, commands = FILES[file]
    content = made(name)
    Path(file).write_bytes(content if isinstance(content, bytes) else content.encode())
    for command in commands:
        Path("page.html").unlink(missing_ok=True)
        code = main([word.replace("{page}", "page.html").replace("{}", file) for word in command.split()])
        out, errors = capsys.readouterr()
        assert code in set(ExitCode) - {ExitCode.INTERRUPTED}
        assert "Traceback" not in errors
        assert errors.count("\n") <= 1, errors
        acting = sorted({char for char in out + errors if not char.isprintable()} - {"\n"})
        assert not acting, f"memo {command}: {acting!r}"
        if code == ExitCode.OK and "{page}" in command:
            page = Path("page.html").read_text(encoding="utf-8")
            assert "canary()</script>" not in page
            assert "<img src=x" not in page
            policy = re.search(r"Content-Security-Policy\" content=\"([^\"]*)\"", page)
            assert policy is not None
            assert "script-src 'sha256-" in policy[1]


def test_the_documents_of_this_test_are_read_and_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else refusals would be all that is tested."""
    monkeypatch.chdir(tmp_path)
    shown = {"plan.json": "show {}", "trace.jsonl": "trace stats {}", "buffers.json": "pack {} --time-limit 1s"}
    for file, command in shown.items():
        content = FILES[file][0]("-NAME\x1b[1m")
        Path(file).write_text(str(content))
        assert main(command.format(file).split()) == ExitCode.OK, capsys.readouterr().err
        assert "-NAME\\x1b" in capsys.readouterr().out
