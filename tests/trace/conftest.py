"""Traces for these tests: literal ones from events, and realistic ones from benchmarks/synthetic_trace.py."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from memo.trace.events import Event, to_json
from memo.trace.reader import Trace

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
