"""memo.offload(model) with nothing but budgets: bytes in use stay within them in every step, the first included."""

from __future__ import annotations

import contextlib
import gc
import itertools
from typing import Any

import pytest
import torch

import memo
from memo.gpt import preset
from memo.gpt.model import GPT

pytestmark = pytest.mark.gpu

LAYERS = 10
SEQ = 1024
STEPS = 12
MIB = 1 << 20


def requested() -> int:
    return int(torch.cuda.memory_stats()["requested_bytes.all.current"])


class Training:
    """A model, its tokens, and the same steps each time."""

    def __init__(self, variant: str) -> None:
        torch.manual_seed(0)
        config = preset("tiny", variant=variant, layers=LAYERS, max_seq=SEQ, vocab_size=512)
        self.model = GPT(config, device=torch.device("cuda"), dtype=torch.bfloat16)
        self.ids = torch.randint(0, 512, (2, SEQ + 1), device="cuda")

    def step(self, manager: Any = None) -> tuple[int, list[torch.Tensor]]:
        """Most bytes asked of torch at one time, by its log, and the gradients.

        torch's counters of blocks are restarted while memo measures; it warns itself of a step that they show too large.
        """
        before = requested()
        torch.cuda.memory._record_memory_history(max_entries=1 << 20, context=None, clear_history=True)
        with contextlib.nullcontext() if manager is None else manager:
            loss = self.model(self.ids[:, :-1], self.ids[:, 1:])
        loss.backward()
        torch.cuda.synchronize()
        events = torch.cuda.memory._snapshot()["device_traces"][0]
        torch.cuda.memory._record_memory_history(enabled=None)
        signs = {"alloc": 1, "free_requested": -1}
        in_use = [
            *itertools.accumulate((signs.get(each["action"], 0) * each["size"] for each in events), initial=before)
        ]
        assert in_use[-1] == requested()
        found = [loss.detach(), *(p.grad for p in self.model.parameters() if p.grad is not None)]
        found = [each.cpu() for each in found]
        self.model.zero_grad(set_to_none=True)
        return max(in_use), found

    def peak(self, **options: Any) -> int:
        """Of the second step by a fixed setting."""
        manager = memo.offload(self.model, disk=[], min_bytes=4096, **options)
        peaks = [self.step(manager)[0] for _ in range(2)]
        manager.close()
        gc.collect()
        return peaks[-1]


@pytest.mark.filterwarnings("ignore:no room for")  # it stays on the device, and may
@pytest.mark.parametrize("variant", ["gpt", "llama"])
@pytest.mark.parametrize("share", [0.1, 0.3, 0.6])
@pytest.mark.parametrize("host", ["64MiB", "12MiB", "2MiB"])
def test_budgets_hold_in_every_step_the_first_included(variant: str, share: float, host: Any) -> None:
    training = Training(variant)
    training.step()
    most, want = training.step()
    least = training.peak(alpha=0.0, host="64MiB")
    budget = int(least + share * (most - least))
    manager = memo.offload(training.model, device=budget, host=host, disk=[], min_bytes=4096)
    peaks = []
    for _ in range(STEPS):
        peak, got = training.step(manager)
        peaks.append(peak)
        assert all(map(torch.equal, got, want))
    report = manager.report()
    manager.close()
    steps = ", ".join(f"{peak / MIB:.2f}" for peak in peaks)
    told = f"budget {budget / MIB:.2f}, steps {steps}, {least / MIB:.2f} to {most / MIB:.2f}"
    assert max(peaks) <= budget, f"{told}\n{report}"
    assert manager.plan is not None, report
