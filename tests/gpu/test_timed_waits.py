"""Waits and recomputes that a manager reports, against arithmetic: an emulated device with a clock of its own.

On that clock copies over the link take bytes / rate, `torch.cuda._sleep` takes its cycles, and nothing else takes time. So
whatever a step takes beyond its sleeps it waited.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        "emulated_cuda" not in getattr(sys.modules.get("operators"), "__file__", ""),
        reason="needs the emulated device's clock",
    ),
]

PROGRAM = """
import json, sys
import torch
from stream_programs import Block, Blocks, batch
import memo
from memo.swap.levels import Level

FORWARD_MS, BACKWARD_MS = 2, 4

class Slow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        torch.cuda._sleep(FORWARD_MS * 1_000_000)
        return x.clone()
    @staticmethod
    def backward(ctx, gradient):
        torch.cuda._sleep(BACKWARD_MS * 1_000_000)
        return gradient

@memo.recomputable  # a replay runs it again: the sleep is no operator
def slow(x):
    return Slow.apply(x)

class Timed(Block):
    def forward(self, x):
        wide = slow(x.repeat(1, 2))  # more bytes than the input that it is made of
        return super().forward(x) + (wide * wide)[:, :64]

timing, repeats = sys.argv[1] == "timed", sys.argv[2] == "repeats"
torch.manual_seed(0)
model = Blocks(lambda: Timed(64)).cuda()
options = {"trace": sys.argv[3]} if timing else {}
if repeats:
    options["levels"] = {number: Level.SAVE_INPUT for number in range(len(model.layers) - 1)}
manager = memo.offload(model, alpha=1.0, host="64MiB", min_bytes=512, **options)
begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
taken = []
for step in range(3):
    x = batch(step)
    torch.cuda.synchronize()
    before = manager.stats.stall_s
    begin.record()
    with manager:
        loss = model(x)
    loss.backward()
    end.record()
    torch.cuda.synchronize()
    manager.step_done()
    after = manager.stats.stall_s
    taken.append((begin.elapsed_time(end) / 1e3, None if after is None else after - before))
slept = len(model.layers) * (FORWARD_MS + BACKWARD_MS) / 1e3
print(json.dumps({"steps": taken, "slept_s": slept, "moved": manager.stats.bytes_host, "report": str(manager.report()),
                  "recompute_s": manager.stats.recompute_s}))
manager.close()
"""


def run(link_bytes_per_s: int, *, timing: str = "timed", what: str = "moves", trace: Path) -> dict[str, object]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, timing, what, str(trace)],
        env={
            **os.environ,
            "EMULATED_CUDA_LINK": str(link_bytes_per_s),
            "PYTHONPATH": str(Path(__file__).parent.parent / "support"),
        },
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


@pytest.mark.parametrize("link_bytes_per_s", [20_000_000, 50_000_000])
def test_waits_of_a_step_that_waits_for_the_link_are_its_time_beyond_its_work(
    link_bytes_per_s: int, tmp_path: Path
) -> None:
    said = run(link_bytes_per_s, trace=tmp_path / "t.jsonl")
    for took_s, waited_s in said["steps"]:  # type: ignore[attr-defined]
        beyond = took_s - said["slept_s"]
        assert beyond > 0.2 * took_s  # the link is what the step waits for
        assert waited_s == pytest.approx(beyond, rel=0.05)
    assert "stalls: drain" in said["report"]  # type: ignore[operator]
    assert "reload" in said["report"]  # type: ignore[operator]


def test_a_step_whose_copies_hide_waits_for_nothing(tmp_path: Path) -> None:
    said = run(100_000_000_000, trace=tmp_path / "t.jsonl")
    for took_s, waited_s in said["steps"]:  # type: ignore[attr-defined]
        assert took_s == pytest.approx(said["slept_s"], rel=0.02)
        assert waited_s < 0.02 * took_s


def test_recomputes_take_what_the_forwards_that_they_repeat_take(tmp_path: Path) -> None:
    said = run(100_000_000_000, what="repeats", trace=tmp_path / "t.jsonl")
    repeated = 3 * 5 * 2e-3  # three steps of five layers
    assert said["recompute_s"] == pytest.approx(repeated, rel=0.05)


def test_without_timing_nothing_is_claimed(tmp_path: Path) -> None:
    said = run(20_000_000, timing="untimed", trace=tmp_path / "t.jsonl")
    assert all(waited_s is None for _, waited_s in said["steps"])  # type: ignore[attr-defined]
    assert "not measured" in said["report"]  # type: ignore[operator]
