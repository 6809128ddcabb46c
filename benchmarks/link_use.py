"""Rates that memo's copies of one traced step reach in each direction, against the link measured by itself."""

from __future__ import annotations

import tempfile
from typing import TYPE_CHECKING, Any

import memo
from benchmarks.comparison import Setup, guarded, link_rates, release_memory, train_step
from benchmarks.peers.ways import managed
from memo.events import Lane, Span
from memo.trace.reader import read_trace

if TYPE_CHECKING:
    from memo.gpt.config import GPTConfig

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
    alone = {Lane.D2H: rates.d2h_bytes_per_s, Lane.H2D: rates.h2d_bytes_per_s}
    spans = _second_step(setup, config, host)
    use = {}
    for lane, nominal in alone.items():
        copies = [span for span in spans if span.lane is lane and (span.nbytes or 0) >= LEAST_BYTES]
        busy_ns = sum(copy.d for copy in copies)
        if busy_ns:
            rate = sum(copy.nbytes or 0 for copy in copies) / busy_ns * 1e9
            use[lane.value] = {"bytes_per_s": rate, "link_bytes_per_s": nominal, "share": rate / nominal}
    return use


def _second_step(setup: Setup, config: GPTConfig, host: str) -> list[Span]:
    """The spans of a step after the one in which memory is locked and recomputes are tried."""
    model, ids = setup.make(config)
    with tempfile.TemporaryDirectory() as folder:
        manager = memo.offload(model, alpha=1.0, host=host, disk=[], trace=folder)
        try:
            for _ in range(2):
                train_step(model, ids, managed(manager))
        finally:
            manager.close()
        trace = read_trace(f"{folder}/trace.rank0.jsonl", steps=range(1, 2))
    return [event for event in trace.events if isinstance(event, Span)]
