"""Segments of torch's allocator: expandable under memo, unless somebody chose, and as the simulated allocator has them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.gpu

OPENED = """
import torch, memo
from torch import nn
from memo.autoplan import device_budget_of
model = nn.Sequential(nn.ModuleList(nn.Linear(8, 8) for _ in range(2))).cuda()
manager = memo.offload(model, host="1MiB", **OPTIONS)
settings = torch.cuda.memory._snapshot()["allocator_settings"]
usable = device_budget_of(torch.device("cuda", 0), None).total_bytes
share = usable / torch.cuda.get_device_properties(0).total_memory
print(settings["expandable_segments"], settings["garbage_collection_threshold"], share)
"""

AS_SIMULATED = """
import random, sys, torch
from memo.allocator import CachingAllocator, Segments
draw, tensors, blocks = random.Random(7), [], []
model = CachingAllocator(Segments(sys.argv[1]))
for _ in range(4000):
    if tensors and draw.random() < (0.45 if len(tensors) < 40 else 0.55):
        at = draw.randrange(len(tensors))
        del tensors[at]
        model.free(blocks.pop(at))
    else:
        nbytes = round(2 ** draw.uniform(6, 26))
        tensors.append(torch.empty(nbytes, dtype=torch.uint8, device="cuda"))
        blocks.append(model.malloc(nbytes))
    torchs = torch.cuda.memory_reserved(), torch.cuda.memory_allocated()
    assert torchs == (model.reserved_nbytes, model.allocated_nbytes), torchs
print(model.driver_calls)
"""

UNDER_A_LIMIT = """
import random, sys, torch
from memo.allocator import CachingAllocator, Segments
model = CachingAllocator(Segments(sys.argv[1]), int(sys.argv[2]))
def refused(malloc, free, error):
    draw, held, found = random.Random(7), {}, 0
    for number in range(6000):
        if draw.random() < 0.45:
            at = draw.randrange(max(0, number - 80), number + 1)
            if at in held: free(held.pop(at))
        else:
            nbytes = round(2 ** draw.uniform(6, 26))
            try: held[number] = malloc(nbytes)
            except error: found += 1
    return found
by_torch = refused(lambda n: [torch.empty(n, dtype=torch.uint8, device="cuda")], lambda t: t.clear(), torch.OutOfMemoryError)
print(by_torch, refused(model.malloc, model.free, MemoryError))
"""


def run(program: str, *arguments: str, **environment: str) -> str:
    known = {name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name}
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, env=known | environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("options", [{}, {"alpha": 1.0}])
@pytest.mark.parametrize(
    ("chosen", "told"),
    [
        ("", "True 0.0 0.94"),
        ("garbage_collection_threshold:0.75", "True 0.75 0.94"),
        ("expandable_segments:False", "False 0.0 0.85"),
        ("expandable_segments:True", "True 0.0 0.94"),
        ("expandable_segments:False,garbage_collection_threshold:0.75", "False 0.75 0.85"),
    ],
)
def test_a_manager_makes_segments_expandable_unless_somebody_chose(
    options: dict[str, float], chosen: str, told: str
) -> None:
    program = OPENED.replace("OPTIONS", repr(options))
    expandable, threshold, share = run(program, PYTORCH_ALLOC_CONF=chosen).split()
    assert f"{expandable} {threshold} {float(share):.2f}" == told


@pytest.mark.parametrize("kind", ["fixed", "expandable"])
def test_the_simulated_allocator_reserves_what_torch_reserves(kind: str) -> None:
    calls = run(AS_SIMULATED, kind, PYTORCH_ALLOC_CONF=f"expandable_segments:{kind == 'expandable'}")
    assert int(calls) > 10


@pytest.mark.parametrize("kind", ["fixed", "expandable"])
def test_the_simulated_allocator_refuses_about_what_torch_refuses(kind: str) -> None:
    if "emulated" not in torch.cuda.get_device_name():
        pytest.skip("takes a device of 256 MiB")
    limit = str(256 << 20)
    conf = f"expandable_segments:{kind == 'expandable'}"
    told = run(UNDER_A_LIMIT, kind, limit, PYTORCH_ALLOC_CONF=conf, EMULATED_CUDA_BYTES=limit)
    by_torch, by_model = map(int, told.split())
    assert by_torch > 200
    assert abs(by_torch - by_model) <= 0.1 * by_torch, told
