"""The page of a running job: its server, and in Chromium what a person sees while steps come in."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from report_page import domain, needs_browser

from memo.cli.main import main
from memo.errors import ExitCode, UsageError
from memo.trace.live import LiveServer


class Growing:
    """A trace of five steps, given out step by step."""

    def __init__(self, synthetic: ModuleType, folder: Path) -> None:
        whole = folder / "whole.jsonl"
        synthetic.write(whole, synthetic.Workload(layers=4, tensors=2, steps=5))
        self.path = folder / "trace.rank0.jsonl"
        self._lines = whole.read_bytes().splitlines(keepends=True)

    def steps(self, upto: int, *, more: int = 0) -> None:
        """Writes all up to the end of so many steps, and so many bytes of what follows."""
        ends = [i for i, line in enumerate(self._lines) if b'"k": "step"' in line and b'"phase": "end"' in line]
        whole = self._lines[: ends[upto - 1] + 1] if upto else self._lines[:1]
        self.path.write_bytes(b"".join(whole) + b"".join(self._lines[len(whole) :])[:more])

    def end(self) -> None:
        self.path.write_bytes(b"".join(self._lines))


@pytest.fixture
def growing(synthetic: ModuleType, tmp_path: Path) -> Growing:
    return Growing(synthetic, tmp_path)


@pytest.fixture
def server(growing: Growing) -> Iterator[LiveServer]:
    with LiveServer([growing.path]) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(server: LiveServer, after: int = 0) -> dict[str, Any] | None:
    with urllib.request.urlopen(f"{server.url}data?after={after}") as reply:
        text = reply.read()
        return None if reply.status == 204 else json.loads(text)


def steps_of(answer: dict[str, Any] | None) -> list[int]:
    assert answer is not None
    return [step["step"] for step in answer["page"]["stats"]["ranks"][0]["steps"]]


def test_the_server_sends_what_is_new_and_nothing_twice(server: LiveServer, growing: Growing) -> None:
    first = ask(server)
    assert first is not None
    assert first["page"] is None
    assert "waiting for the first step of" in first["status"]
    assert ask(server, first["version"]) is None
    growing.steps(2, more=100)
    second = ask(server, first["version"])
    assert len(steps_of(second)) == 2
    assert second is not None
    assert second["status"].startswith("live")
    growing.steps(2, more=300)  # half a step is no news
    assert ask(server, second["version"]) is None
    growing.end()
    last = ask(server, second["version"])
    assert last is not None
    assert last["status"] == "the run has ended"
    assert len(steps_of(last)) == 4


def test_a_damaged_file_is_said_on_the_page_and_the_server_goes_on(server: LiveServer, growing: Growing) -> None:
    growing.path.write_text("no trace\n")
    said = ask(server)
    assert said is not None
    assert "line 1" in said["status"]
    growing.steps(1)
    assert steps_of(ask(server))


@pytest.mark.parametrize("headers", [{"Host": "evil.example"}, {"Host": "evil.example:80"}, {"Host": ""}])
def test_only_this_machine_by_its_own_name_is_answered(server: LiveServer, headers: dict[str, str]) -> None:
    assert server.server_address[0] == "127.0.0.1"
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(urllib.request.Request(f"{server.url}data", headers=headers))
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"{server.url}etc/passwd")


def test_a_port_that_is_taken_is_one_line(server: LiveServer, growing: Growing) -> None:
    with pytest.raises(UsageError, match=f"port {server.server_port} cannot be used"):
        LiveServer([growing.path], port=server.server_port)


@pytest.mark.parametrize(
    "flags", [["--live", "-o", "x.html"], ["--live", "--port", "70000"], ["--live", "--steps", "1"], []]
)
def test_contradictions_are_refused(flags: list[str], growing: Growing, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "html", str(growing.path), *flags]) == ExitCode.USAGE
    assert capsys.readouterr().err.count("\n") == 1


@needs_browser
def test_steps_come_in_and_what_is_looked_at_stays(server: LiveServer, growing: Growing, browser: Any) -> None:
    context = browser.new_context(viewport={"width": 1280, "height": 720})
    page = context.new_page()
    troubles: list[str] = []
    page.on("console", lambda message: troubles.append(message.text))
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.goto(server.url)
    page.wait_for_function("() => document.querySelector('#live').textContent.startsWith('waiting for the first step')")

    growing.steps(1)
    page.wait_for_selector("#step")
    first = page.input_value("#step")
    page.fill("#search", "layers.1")
    begin, end = domain(page)
    page.locator("canvas.plot").hover()
    page.mouse.wheel(0, -400)
    zoomed = domain(page)
    assert zoomed[1] - zoomed[0] < end - begin

    growing.steps(2)
    page.wait_for_function(f"() => document.querySelector('#step').value !== '{first}'")
    second = page.input_value("#step")
    assert int(second) == int(first) + 1  # the newest is followed, at the same zoom
    moved = domain(page)
    assert moved[0] > zoomed[0]
    assert moved[1] - moved[0] == pytest.approx(zoomed[1] - zoomed[0], rel=0.01)
    assert page.input_value("#search") == "layers.1"
    assert page.locator("canvas.plot").count() == 1

    page.select_option("#step", first)  # an older step that was chosen stays
    growing.steps(3)
    page.wait_for_function("() => document.querySelectorAll('#step option').length === 4")
    assert page.input_value("#step") == first
    growing.end()
    page.wait_for_function("() => document.querySelector('#live').textContent === 'the run has ended'")
    context.close()
    assert troubles == []
