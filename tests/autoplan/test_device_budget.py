"""A CPU's budget counts what is in use for the device: neither what was freed nor what the host tier has."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from memo.autoplan import device_budget, device_budget_of, missing_gradient_bytes
from memo.swap import touched_slab_bytes
from memo.swap.backends import CpuBackend
from memo.swap.tiers import HostTier

MIB = 1 << 20


def filled(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8).fill_(1)


def test_freed_tensors_leave_the_count_and_its_peak_shows_them() -> None:
    memory = device_budget_of(torch.device("cpu"), 1 << 40)
    assert memory.frees_at_once
    memory.restart()
    before = memory.used_bytes()
    tensors = [filled(MIB) for _ in range(64)]
    after = filled(MIB)
    del tensors
    assert memory.trim is not None
    memory.trim()  # what lay in holes that earlier tests left in the heap
    assert memory.used_bytes() - before < 8 * MIB
    assert memory.peak_bytes() - before > 60 * MIB
    memory.restart()
    assert memory.peak_bytes() - before < 8 * MIB
    assert after.numel()


def test_reload_buffers_that_were_freed_leave_the_count_too() -> None:
    memory, backend = device_budget_of(torch.device("cpu"), 1 << 40), CpuBackend()
    before = memory.used_bytes()
    buffers = [backend.empty(4 * MIB).fill_(1) for _ in range(16)]
    del buffers
    assert memory.trim is not None
    memory.trim()
    assert memory.used_bytes() - before < 8 * MIB


def test_bytes_in_the_host_tier_are_not_the_devices() -> None:
    memory, backend = device_budget_of(torch.device("cpu"), 1 << 40), CpuBackend()
    tier = HostTier(backend, 128 * MIB, segment_bytes=MIB)
    source = filled(MIB)
    memory.restart()
    before, slabs = memory.used_bytes(), touched_slab_bytes()
    extents = [tier.reserve(MIB) for _ in range(64)]
    for extent in extents:
        assert extent is not None
        tier.write(extent, source, after=backend.compute_event()).synchronize()
    assert touched_slab_bytes() - slabs == 64 * MIB
    assert memory.used_bytes() - before < 8 * MIB
    assert memory.peak_bytes() - before < 8 * MIB
    tier.close()
    assert touched_slab_bytes() == slabs


def test_without_a_budget_it_is_what_is_in_use_and_a_share_of_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_budget, "rss_bytes", lambda: 100)
    monkeypatch.setattr(device_budget, "peak_rss_bytes", lambda: 10_000)  # as a checkpoint was loaded, say
    monkeypatch.setattr(device_budget, "available_host_bytes", lambda: 1000)
    monkeypatch.setattr(device_budget, "touched_slab_bytes", lambda: 0)
    assert device_budget_of(torch.device("cpu"), None).total_bytes == 100 + 800


def test_where_freed_memory_stays_a_step_has_one_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_budget, "freed_memory_returns", lambda: False)
    assert not device_budget_of(torch.device("cpu"), 1).frees_at_once
    monkeypatch.undo()
    monkeypatch.setattr(device_budget, "restart_peak_rss", lambda: False)
    assert not device_budget_of(torch.device("cpu"), 1).frees_at_once


def test_a_manager_on_a_cpu_makes_its_process_return_what_it_frees() -> None:
    program = """
import torch, memo
from memo.gpt.config import preset
from memo.gpt.model.model import GPT
from memo.machine.process_memory import rss_bytes

torch.empty(30 << 20, dtype=torch.uint8)  # glibc takes smaller blocks from its heap from now on
manager = memo.offload(GPT(preset("tiny")), alpha=1.0, host="1GiB")
before = rss_bytes()
tensors = [torch.empty(1 << 20, dtype=torch.uint8).fill_(1) for _ in range(64)]
last = torch.empty(100)
del tensors
print(rss_bytes() - before)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 8 * MIB


def test_a_program_that_has_trained_without_memo_leaves_no_hole_that_counts() -> None:
    """Its freed activations are holes in the heap, which later ones fill; between two layers their pages leave."""
    program = """
import torch, memo
from memo.gpt.config import preset
from memo.gpt.model.model import GPT
from memo.machine.process_memory import peak_rss_bytes, restart_peak_rss, rss_bytes

large = torch.empty(30 << 20, dtype=torch.uint8)
del large  # glibc takes smaller blocks from its heap from now on
model = GPT(preset("tiny", layers=8, hidden=128, heads=2, kv_heads=2, ffn=512, max_seq=2048))
ids = torch.randint(0, 257, (1, 2049))
for _ in range(2):
    model(ids[:, :-1], ids[:, 1:]).backward()
model.zero_grad()
manager = memo.offload(model, device="1TiB", host="1GiB")
print(rss_bytes(), end=" ")
for _ in range(2):
    with manager:
        loss = model(ids[:, :-1], ids[:, 1:])
    loss.backward()
    model.zero_grad()
    del loss
print(manager.stats.peak_saved_bytes, rss_bytes())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    before, saved, after = map(int, done.stdout.split())
    assert saved > 100 * MIB, "else nothing was tested"
    assert after < before + saved // 2  # code that is used first, and the host tier's few bytes


def test_gradients_that_hooks_take_in_backward_are_not_missing() -> None:
    taken, kept, frozen = (torch.nn.Parameter(torch.zeros(4), requires_grad=trained) for trained in (True, True, False))
    hook = taken.register_post_accumulate_grad_hook(lambda _: None)
    cpu = torch.device("cpu")
    assert missing_gradient_bytes([taken, kept, frozen], cpu) == kept.nbytes
    hook.remove()
    assert missing_gradient_bytes([taken, kept, frozen], cpu) == taken.nbytes + kept.nbytes


def test_gradients_of_parameters_on_the_host_take_no_room_on_a_gpu() -> None:
    """FSDP with CPU offload copies each shard's gradient to the host."""
    assert missing_gradient_bytes([torch.nn.Parameter(torch.zeros(4))], torch.device("cuda")) == 0
