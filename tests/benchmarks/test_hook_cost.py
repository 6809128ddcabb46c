"""Pack and unpack stay cheap: calls of Python and C functions a saved tensor, which no other work on the machine changes."""

from __future__ import annotations

import sys
from itertools import pairwise

import pytest
import torch

from benchmarks import hook_cost
from memo.gpt import preset
from memo.gpt.model import GPT
from memo.manager import Manager
from memo.swap import Engine, find_layers
from memo.swap.backends import CpuBackend


def calls(work: object) -> int:
    """How many functions `work()` calls in this thread, those of C among them."""
    count = 0

    def seen(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(seen)
    try:
        work()  # type: ignore[operator]
    finally:
        sys.setprofile(None)
    return count


def calls_and_saved_tensors(layers: int, min_bytes: int) -> tuple[int, int]:
    """Calls of a settled step above those of the same step without memo, and how many tensors autograd saves in it."""
    model = GPT(preset("tiny", layers=layers, hidden=64, heads=2, vocab_size=64, max_seq=16))
    ids = torch.randint(0, 64, (1, 16))
    tier = hook_cost.KeepsTheSource()
    memo = Manager(model, find_layers(model), Engine(CpuBackend(), [tier], min_bytes=min_bytes))
    for _ in range(3):
        hook_cost.step(model, ids, memo)
    above = calls(lambda: hook_cost.step(model, ids, memo)) - calls(lambda: hook_cost.step(model, ids, None))
    assert sum(memo.stats.uses.values()) > 0
    return above, hook_cost.saved_tensors(model, ids)


@pytest.mark.promise("P3", "R12")
@pytest.mark.parametrize(("min_bytes", "most"), [(1024, 71), (1, 99)])
def test_one_more_saved_tensor_costs_few_calls_however_many_there_are(min_bytes: int, most: int) -> None:
    """64 and 90 calls on 2026-11-28; `most` is a tenth above."""
    found = [calls_and_saved_tensors(layers, min_bytes) for layers in (4, 8, 24)]
    few, many = ((b[0] - a[0]) / (b[1] - a[1]) for a, b in pairwise(found))
    assert few < most
    assert many < 1.02 * few
