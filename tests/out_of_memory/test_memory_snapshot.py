"""Snapshots of torch's allocator: replayed to the error, and nothing but plain data is read."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest

from memo.errors import TraceError
from memo.out_of_memory import SAVED, explain_memory, held_in_snapshot, read_snapshot
from memo.out_of_memory.explanation import Cause
from memo.trace import TRANSIENT

MIB = 1 << 20


def frame(name: str, filename: str, line: int = 1) -> dict[str, Any]:
    return {"name": name, "filename": filename, "line": line}


FORWARD = [
    frame("at::native::empty_cuda", "??", 0),
    frame("linear", "/usr/lib/torch/nn/functional.py", 134),
    frame("forward", "/home/me/gpt/model.py", 41),
    frame("<module>", "/home/me/gpt/train.py", 9),
]
WEIGHTS = [frame("_apply", "/usr/lib/torch/nn/modules/module.py"), frame("<module>", "/home/me/gpt/train.py", 3)]
OPTIMIZER = [frame("_init_group", "/usr/lib/torch/optim/adamw.py"), frame("<module>", "/home/me/gpt/train.py", 12)]
BACKWARD = [
    frame("_engine_run_backward", "/usr/lib/torch/autograd/graph.py"),
    frame("backward", "/usr/lib/torch/_tensor.py"),
]


def event(action: str, addr: int, size: int, frames: list[dict[str, Any]] | None = None, **more: Any) -> dict[str, Any]:
    return {"action": action, "addr": addr, "size": size, "stream": 0, "time_us": 0, "frames": frames or [], **more}


def block(address: int, size: int, state: str, frames: list[dict[str, Any]] | None = None) -> dict[str, Any]:
    return {"address": address, "size": size, "requested_size": size, "state": state, "frames": frames or []}


@pytest.fixture
def snapshot() -> dict[str, Any]:
    """100 MiB of weights and 60 of optimizer state from before; activations that are gone by the time of the dump."""
    a, b, c, d = 0, 100 * MIB, 200 * MIB, 500 * MIB
    segment = {
        "device": 0,
        "address": 0,
        "total_size": 600 * MIB,
        "allocated_size": 160 * MIB,
        "active_size": 160 * MIB,
    }
    segment |= {"stream": 0, "segment_type": "large", "frames": []}
    segment["blocks"] = [
        block(a, 100 * MIB, "active_allocated", WEIGHTS),
        block(b, 60 * MIB, "active_allocated", OPTIMIZER),
        block(160 * MIB, 440 * MIB, "inactive"),
    ]
    events = [
        event("free_requested", 550 * MIB, 10 * MIB),
        event("free_completed", 550 * MIB, 10 * MIB),  # made before the first event
        event("alloc", c, 250 * MIB, FORWARD),
        event("alloc", d, 20 * MIB, BACKWARD),
        event("segment_alloc", 0, 100 * MIB),
        event("oom", 0, 300 * MIB, FORWARD, device_free=50 * MIB),
        event("free_requested", c, 250 * MIB),
        event("free_completed", c, 250 * MIB),
        event("free_completed", d, 20 * MIB),
        event("snapshot", 0, 0),
    ]
    return {"segments": [segment], "device_traces": [events], "allocator_settings": {}, "external_annotations": []}


def test_the_state_at_the_error_is_restored(snapshot: dict[str, Any]) -> None:
    held = held_in_snapshot(snapshot)
    assert held.ran_out
    assert held.bands == {"weights": 100 * MIB, "optimizer state": 60 * MIB, SAVED: 250 * MIB, TRANSIENT: 20 * MIB}
    assert (held.requested_nbytes, held.reserved_nbytes, held.capacity_nbytes) == (300 * MIB, 600 * MIB, 650 * MIB)
    first = held.holders[0]
    assert (first.what, first.nbytes, first.op) == ("saved", 250 * MIB, "at::native::empty_cuda")
    assert first.line == "gpt/model.py:41 forward < gpt/train.py:9 <module>"
    answer = explain_memory(held)
    assert answer.cause is Cause.ACTIVATIONS
    assert answer.sentences[0].startswith(
        "When memory ran out the device held 430 MiB when 300 MiB more were asked for"
    )


def test_without_an_error_it_is_the_largest_total(snapshot: dict[str, Any]) -> None:
    events = snapshot["device_traces"][0]
    del events[5]
    held = held_in_snapshot(snapshot)
    assert not held.ran_out
    assert held.nbytes == 430 * MIB
    assert held.reserved_nbytes == 500 * MIB  # before the segment that came later


def test_fragmentation_is_told_from_want(snapshot: dict[str, Any]) -> None:
    snapshot["device_traces"][0][5]["size"] = 150 * MIB  # 170 are free in the segments
    assert explain_memory(held_in_snapshot(snapshot)).cause is Cause.FRAGMENTATION


class Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("touch /tmp/never",)


@pytest.mark.parametrize("content", [Hostile(), {"segments": [Hostile()]}, [1], {"segments": 3}])
def test_anything_but_plain_data_is_refused(content: Any, tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(content))
    with pytest.raises(TraceError, match="no snapshot of torch's memory"):
        read_snapshot(path)


def test_a_missing_file_is_named_without_quotes(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=f"^{tmp_path}/none: cannot read: No such file"):
        read_snapshot(tmp_path / "none")


def test_a_damaged_file_is_an_error_of_ours(snapshot: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "snapshot.pickle"
    path.write_bytes(pickle.dumps(snapshot)[:200])
    with pytest.raises(TraceError, match="no snapshot"):
        read_snapshot(path)
    del snapshot["segments"][0]["blocks"]
    with pytest.raises(TraceError, match="damaged"):
        held_in_snapshot(snapshot)
