"""The planned allocator under torch on a real GPU. Each test is a process of its own: an allocator is chosen once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

PREAMBLE = """
import sys, warnings
import torch, memo
allocator = memo.use_planned_allocator() if sys.argv[1] == "planned" else None
torch.use_deterministic_algorithms(True)  # attention keeps its atomics with warn_only
from memo.gpt.config import preset
from memo.gpt.model.model import GPT

def make():
    torch.manual_seed(0)
    return GPT(preset("tiny", vocab_size=512, max_seq=4096)).to(device="cuda", dtype=torch.bfloat16)

def batch(number, seq=1024):
    return torch.randint(0, 512, (2, seq + 1), generator=torch.Generator().manual_seed(number)).cuda()

def digest(model):
    return sum(int(p.view(torch.int16).long().sum()) * (i + 1) for i, p in enumerate(model.parameters()))

def report(**figures):
    print(" ".join(f"{name}={value}" for name, value in figures.items()))
"""

STEPS = """
model = make()
manager = memo.offload(model, alpha=1.0, host="1GiB", min_bytes=512) if sys.argv[2] == "offload" else None
adam = torch.optim.AdamW(model.parameters(), lr=1e-3)

def step(number, seq=1024):
    ids = batch(number, seq)
    if manager is None:
        loss = model(ids[:, :-1], ids[:, 1:])
    else:
        with manager:
            loss = model(ids[:, :-1], ids[:, 1:])
    loss.backward()
    adam.step()
    adam.zero_grad(set_to_none=True)
    if manager is not None:
        manager.step_done()
    return float(loss)
"""


def run(program: str, *arguments: str) -> dict[str, str]:
    """What the program reported."""
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    done = subprocess.run(
        [sys.executable, "-c", PREAMBLE + program, *arguments],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env={**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"},  # the same bits each time
        cwd=Path(__file__).parent,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(pair.split("=", 1) for pair in done.stdout.split())


TRAINING = (
    STEPS
    + """
losses = []
for number in range(16):
    if allocator is None or manager is not None:
        losses.append(step(number))
    else:
        with allocator.step():
            losses.append(step(number))
    if number < 10 and allocator is not None:
        allocator.wait()  # the first plans; under offload also those that learn how late copies let go
    if number == 10:
        start = memo.memory_stats()
end = memo.memory_stats()
report(
    losses=sum(losses), digest=digest(model),
    mallocs=end.device_mallocs - start.device_mallocs,
    planned=end.planned, fallbacks=end.fallbacks, arena=end.arena_bytes, peak=end.peak_allocated_bytes,
    reserved=end.reserved_bytes,
)
"""
)


@pytest.mark.parametrize("way", ["plain", "offload"])
def test_training_is_the_same_and_takes_nothing_from_the_device_after_planning(way: str) -> None:
    plain, planned = run(TRAINING, "torch", way), run(TRAINING, "planned", way)
    assert planned["losses"] == plain["losses"]
    assert planned["digest"] == plain["digest"]
    assert int(planned["planned"]) > 0
    assert int(planned["mallocs"]) == 0


def test_a_plain_step_has_no_fallback_once_it_is_planned() -> None:
    figures = run(TRAINING, "planned", "plain")
    assert int(figures["fallbacks"]) == 0
    assert int(figures["arena"]) > 0


def test_lengths_that_alternate_each_have_a_plan() -> None:
    program = (
        STEPS
        + """
for number in range(16):
    seq = (512, 1024)[number % 2]
    with allocator.step(seq):
        step(number, seq)
    allocator.wait()
report(stages="/".join(allocator.stage(seq).value for seq in (512, 1024)), fallbacks=memo.memory_stats().fallbacks)
"""
    )
    figures = run(program, "planned", "plain")
    assert figures == {"stages": "replay/replay", "fallbacks": "0"}


def test_a_block_that_another_stream_reads_is_not_reused_under_it() -> None:
    program = """
side = torch.cuda.Stream()
wrong = 0
for number in range(8):
    with allocator.step():
        a = torch.full((1 << 24,), number, device="cuda", dtype=torch.int32)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(50_000_000)
            copy = a.clone()
        a.record_stream(side)
        del a
        b = torch.full((1 << 24,), -1, device="cuda", dtype=torch.int32)
        torch.cuda.current_stream().wait_stream(side)
        wrong += int((copy != number).sum())
        del b, copy
    allocator.wait()
report(wrong=wrong, stage=allocator.stage().value)
"""
    assert run(program, "planned") == {"wrong": "0", "stage": "replay"}


def test_empty_tensors_backward_threads_and_interpreter_exit() -> None:
    program = """
import gc
kept = []
for number in range(6):
    with allocator.step():
        empties = [torch.empty(0, device="cuda") for _ in range(10)]
        x = torch.randn(256, 256, device="cuda", requires_grad=True)
        (x @ x).sum().backward()
        kept.append(x.grad.clone())
        del empties, x
    gc.collect()
    allocator.wait()
torch.cuda.synchronize()
report(live=len(kept), planned=memo.memory_stats().planned > 0)
"""
    assert run(program, "planned") == {"live": "6", "planned": "True"}


def test_out_of_memory_is_an_error_and_not_a_fault() -> None:
    program = """
free, total = torch.cuda.mem_get_info()
try:
    torch.empty(2 * total, dtype=torch.uint8, device="cuda")
    said = "nothing"
except RuntimeError as error:
    said = str(error).split(":")[0].replace(" ", "_")
report(said=said, still=int(torch.ones(10, device="cuda").sum()))
"""
    assert run(program, "planned") == {"said": "CUDA_out_of_memory", "still": "10"}


def test_once_cuda_is_in_use_it_is_too_late() -> None:
    program = """
torch.ones(1, device="cuda")
try:
    memo.use_planned_allocator()
    said = "nothing"
except memo.MemoError as error:
    said = type(error).__name__
report(said=said)
"""
    assert run(program, "torch") == {"said": "AllocatorError"}


def test_the_recorded_events_become_a_problem_for_the_planner() -> None:
    program = """
from memo.allocator.plan_from_events import problem_of, recording_of
with allocator.step():
    a = torch.empty(1000, dtype=torch.uint8, device="cuda")
    b = torch.empty(5000, dtype=torch.uint8, device="cuda")
    del a, b
buffers = problem_of(recording_of(allocator.native.events())).buffers
report(lives="/".join(f"{x.start}-{x.end}" for x in buffers), sizes="/".join(str(x.nbytes) for x in buffers))
"""
    assert run(program, "planned") == {"lives": "0-2/1-2", "sizes": "1024/5120"}
