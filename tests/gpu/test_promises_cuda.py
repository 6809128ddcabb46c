"""What other packages' tests of activation offloading promise of a GPU: bytes freed, lifetimes, streams, host memory.

Each case names the suite whose promise it is; the words and the code are ours. What needs no GPU is in
tests/manager/test_promises_of_peers.py; docs/promises.md lists all.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from small_models import Stack, gradients
from torch import nn

import memo
from memo.events import TierName

pytestmark = pytest.mark.gpu

TORCHTUNE = "torchtune: tests/torchtune/training/test_activation_offloading.py"
TE = "TransformerEngine: tests/pytorch/test_cpu_offloading.py"
AXOLOTL = "Axolotl: tests/e2e/test_activation_offloading.py"
MEGATRON_PINNED = "Megatron-LM: tests/unit_tests/pipeline_parallel/test_pinned_activation_buffer.py"

SIDE = 512
BYTES = SIDE * SIDE * 4


def suite(name: str) -> Any:
    """Puts the suite whose promise a test is beside it, and into the test's id."""
    return pytest.mark.parametrize("promised_by", [pytest.param(name, id=name.split(":")[0])])


@pytest.fixture
def device() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    return torch.device("cuda")


class Sine(nn.Module):
    """Saves its input and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(x)


def chain(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = layer(x)
    return x


def allocated() -> int:
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


@suite(TE)
def test_the_bytes_that_moved_are_the_bytes_that_were_freed(device: torch.device, promised_by: str) -> None:
    layers = nn.ModuleList(Sine() for _ in range(8)).to(device)
    x = torch.randn(SIDE, SIDE, device=device, requires_grad=True)
    before = allocated()
    out = chain(layers, x)
    without = allocated() - before
    del out
    manager = memo.offload(layers, layers=layers, alpha=1.0, host="64MiB")
    with manager:
        out = chain(layers, x)
        out = out + 0
    used = allocated() - before
    moved = manager.stats.bytes_host
    assert moved > 0
    assert without - used <= moved
    assert without - used >= moved - 3 * BYTES  # x is the caller's and stays; the last layer's is at work
    out.sum().backward()
    manager.close()


@suite(AXOLOTL)
def test_device_memory_does_not_grow_from_step_to_step(device: torch.device, promised_by: str) -> None:
    torch.manual_seed(0)
    model = Stack(layers=4).to(device)
    manager = memo.offload(model, alpha=1.0, host="64MiB", min_bytes="1KiB")
    ids = torch.randint(0, 61, (2, 48), device=device)
    after = []
    for _ in range(10):
        with manager:
            loss = model(ids)
        loss.backward()
        model.zero_grad()
        del loss
        after.append(allocated())
    assert len(set(after[3:])) == 1
    manager.close()


@suite(TORCHTUNE)
@pytest.mark.parametrize("slow", ["compute", "d2h", "h2d"])
def test_restored_memory_is_not_reused_while_a_lagging_stream_reads_it(
    slow: str, device: torch.device, promised_by: str
) -> None:
    def step(manager: Any) -> tuple[torch.Tensor, ...]:
        layers = nn.ModuleList(Sine() for _ in range(6)).to(device)
        x = torch.linspace(-3, 3, SIDE * SIDE, device=device).view(SIDE, SIDE).requires_grad_()
        if not manager:
            out = chain(layers, x)
            out.sum().backward()
            return out.detach(), x.grad
        made = memo.offload(layers, layers=layers, alpha=1.0, host="64MiB")
        backend: Any = made._engine.backend
        stream = {"d2h": backend.d2h.stream, "h2d": backend.h2d.stream}.get(slow)

        def lag(*_: object) -> None:
            with torch.cuda.stream(stream or torch.cuda.current_stream(device)):
                torch.cuda._sleep(20_000_000)

        for layer in layers:
            layer.register_forward_pre_hook(lag)
        with made:
            out = chain(layers, x)
        torch.full((SIDE, SIDE), float("nan"), device=device)  # takes freed memory, as soon as it may
        out.sum().backward()
        made.close()
        return out.detach(), x.grad

    for ours, theirs in zip(step(True), step(False), strict=True):
        assert torch.equal(ours, theirs)


@suite(MEGATRON_PINNED)
def test_pinned_memory_is_used_again_and_stays_within_its_budget(device: torch.device, promised_by: str) -> None:
    torch.manual_seed(0)
    layers = nn.ModuleList(Sine() for _ in range(6)).to(device)
    manager = memo.offload(layers, layers=layers, alpha=1.0, host=8 * BYTES, disk=[], on_full="raise")
    for _ in range(5):
        x = torch.randn(SIDE, SIDE, device=device, requires_grad=True)
        with manager:
            out = chain(layers, x)
        out.sum().backward()
    assert manager.stats.bytes_host > 8 * BYTES  # more than the budget in all
    assert manager.stats.spilled == 0
    (host,) = (use for use in manager.report().tiers if use.tier is TierName.HOST)
    assert host.peak_bytes <= 7 * BYTES  # those of one step
    (tier,) = manager._engine.tiers
    assert tier.reserved <= 8 * BYTES
    manager.close()


@suite(TE)
def test_a_step_on_a_stream_of_its_own_is_the_one_without(device: torch.device, promised_by: str) -> None:
    def step(*, managed: bool) -> list[torch.Tensor | None]:
        torch.manual_seed(0)
        layers = nn.ModuleList(nn.Linear(SIDE, SIDE) for _ in range(4)).to(device)
        x = torch.ones(8, SIDE, device=device)
        manager = memo.offload(layers, layers=layers, alpha=1.0, host="64MiB", min_bytes="1KiB") if managed else None
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            if manager is None:
                out = chain(layers, x)
            else:
                with manager:
                    out = chain(layers, x)
            out.square().mean().backward()
        stream.synchronize()
        return gradients(layers)

    assert all(torch.equal(a, b) for a, b in zip(step(managed=True), step(managed=False), strict=True))
