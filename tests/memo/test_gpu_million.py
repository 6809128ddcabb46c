"""The arm for a million tokens, at eight thousand and on a CPU: everything but the GPU is as it will be."""

from __future__ import annotations

import pytest
import torch

from benchmarks.gpu_million import Request, choose_depth, measure

REQUEST = Request(
    model="tiny", seq=8192, depths=(4, 2), seconds=1e9, host_bytes=256 << 20, device_bytes=96 << 20, gpu="h200"
)


@pytest.mark.slow
def test_both_ways_take_the_same_step_and_the_plan_is_carried_out() -> None:
    result = measure(REQUEST, torch.device("cpu"))
    assert result["layers"] == 4
    ours, theirs = result["ways"].values()
    assert ours["loss"] == theirs["loss"]
    plan = result["plan"]
    assert plan["peak_host_bytes"] > 0  # the budget of the device is too small for everything
    # The short warm-up comes first, at the same length here. A storage goes to one place whole, where plans have fractions.
    storage = REQUEST.seq * 128 * 2
    assert abs(ours["peak_bytes_by_tier"]["host"] - plan["peak_host_bytes"]) < 2 * storage < plan["peak_host_bytes"]
    assert result["speed_ratio"] > 0
    assert ours["mfu_causal"] > 0


def test_the_depth_is_the_largest_whose_two_steps_fit() -> None:
    request = Request(seq=1 << 20, depths=(24, 12, 8), seconds=420, host_bytes=1, device_bytes=1, gpu="h200")
    assert choose_depth(request, 5.0) == 24
    assert choose_depth(request, 8.0) == 12
    assert choose_depth(request, 14.0) == 8
    assert choose_depth(request, 1000.0) == 8
