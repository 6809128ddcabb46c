"""Traces for these tests: literal ones from events, and realistic ones from benchmarks/synthetic_trace.py."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from report_page import CHROMIUM

from benchmarks.viewer import FLAGS
from memo.events import Event, to_json
from memo.trace import Trace

ROOT = Path(__file__).parent.parent.parent


@pytest.fixture(scope="session")
def synthetic() -> ModuleType:
    """The generator of imagined runs; not a package, so loaded by its path."""
    spec = importlib.util.spec_from_file_location("synthetic_trace", ROOT / "benchmarks" / "synthetic_trace.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def make_trace() -> Callable[..., Trace]:
    """A Trace of given events, as the reader would return it."""

    def make(events: Iterable[Event], **fields: Any) -> Trace:
        given = {"path": "t", "rank": 0, "world_size": 4, "origin_unix_ns": 0, "meta": {}, "dropped": 0} | fields
        return Trace(events=tuple(sorted(events, key=lambda event: event.t)), **given)

    return make


@pytest.fixture
def write_lines(tmp_path: Path) -> Callable[..., Path]:
    """A trace file of the given events and raw lines, header first."""

    def write(
        *lines: Event | str, header: dict[str, Any] | None = None, end: bool = True, name: str = "trace.rank0.jsonl"
    ) -> Path:
        first = {"format": "memo-trace", "version": 1, "rank": 0, "world_size": 1, "origin_unix_ns": 5, "meta": {}}
        texts = [json.dumps(first | (header or {}))]
        texts += [line if isinstance(line, str) else json.dumps(to_json(line)) for line in lines]
        if end:
            texts.append(json.dumps({"k": "end", "t": 0, "events": len(lines), "dropped": 0}))
        path = tmp_path / name
        path.write_text("\n".join(texts) + "\n", encoding="utf-8")
        return path

    return write


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield chromium
        chromium.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Opens a file; whatever the page logs, throws or asks of a network fails the test at its end."""
    troubles: list[str] = []
    contexts = []

    def open_(path: Path, *, scheme: str = "light", width: int = 1280, height: int = 720) -> Any:
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: troubles.append(f"console {message.type}: {message.text}"))
        page.on("pageerror", lambda error: troubles.append(f"error: {error}"))
        page.on("dialog", lambda dialog: (troubles.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on("request", lambda request: _expect_local(request.url, path, troubles))
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-ready]", timeout=20_000)
        return page

    yield open_
    for context in contexts:
        for page in context.pages:
            text = page.evaluate("() => document.body.innerText")
            troubles += re.findall(r".*\b(?:null|undefined|NaN|Infinity)\b.*", text)
        context.close()
    assert troubles == []


def _expect_local(url: str, path: Path, troubles: list[str]) -> None:
    if url != path.as_uri():
        troubles.append(f"request: {url}")
