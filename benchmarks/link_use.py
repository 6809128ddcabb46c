"""The rates that memo's copies of one traced step reach in each direction, against the link measured by itself."""

from __future__ import annotations

import json
import tempfile
from typing import TYPE_CHECKING, Any

import memo
from benchmarks.comparison import Setup, guarded, link_rates, release_memory, train_step
from benchmarks.ways import managed

if TYPE_CHECKING:
    from memo.gpt.config import GPTConfig

__all__ = ["link_use"]

LEAST_BYTES = 4 << 20
"""Smaller copies are launch time more than link time."""


def link_use(setup: Setup, config: GPTConfig, host: str) -> Any:
    """For each lane its rate and its share of the link alone; one line where it could not be measured."""
    found = guarded(lambda: _measured(setup, config, host))
    release_memory()
    if isinstance(found, str):
        print(f"  copies of memo, alpha 1: {found}", flush=True)
        return found
    for lane, use in found.items():
        print(f"  memo's {lane}: {use['bytes_per_s'] / 1e9:.1f} GB/s, {use['share']:.2f} of the link alone", flush=True)
    return found


def _measured(setup: Setup, config: GPTConfig, host: str) -> dict[str, dict[str, float]]:
    rates = link_rates(setup.device)
    assert rates is not None
    alone = {"d2h": rates.d2h_bytes_per_s, "h2d": rates.h2d_bytes_per_s}
    events = _second_step(setup, config, host)
    use = {}
    for lane, nominal in alone.items():
        spans = [event for event in events if event.get("lane") == lane and event["nbytes"] >= LEAST_BYTES]
        busy_ns = sum(span["d"] for span in spans)
        if busy_ns:
            rate = sum(span["nbytes"] for span in spans) / busy_ns * 1e9
            use[lane] = {"bytes_per_s": rate, "link_bytes_per_s": nominal, "share": rate / nominal}
    return use


def _second_step(setup: Setup, config: GPTConfig, host: str) -> list[dict[str, Any]]:
    model, ids = setup.make(config)
    with tempfile.TemporaryDirectory() as folder:
        manager = memo.offload(model, alpha=1.0, host=host, disk=[], trace=folder)
        try:
            for _ in range(2):
                train_step(model, ids, managed(manager))
        finally:
            manager.close()
        with open(f"{folder}/trace.rank0.jsonl", encoding="utf-8") as lines:
            events = [json.loads(line) for line in lines]
    return [event for event in events if event.get("step") == 1]
