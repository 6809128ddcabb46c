"""Seconds of kernels on a simulated GPU, against arithmetic."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from memo.errors import RecordError
from memo.mip.inputs import AttentionKernel, hardware_preset
from memo.rehearsal import SimulatedMachine

# 100 TFLOP/s in products, 50 in attention, 1 TB/s, and no time for a launch that matters.
GPU = dataclasses.replace(
    hardware_preset("h100"),
    peak_flops=200e12,
    matmul_efficiency=0.5,
    attention=(AttentionKernel.alike(0.25),),
    hbm_bytes_per_s=1e12 / 0.9,
)


@pytest.fixture
def machine() -> SimulatedMachine:
    return SimulatedMachine(GPU)


def kernel_s(machine: SimulatedMachine, before_ns: int) -> float:
    """Seconds of compute since `before_ns`, less the launch."""
    return (machine.clock.compute_ns - before_ns) / 1e9


@pytest.mark.parametrize(("dtype", "share"), [(torch.bfloat16, 1.0), (torch.float32, 67 / 989)])
def test_a_product_takes_its_flops(machine: SimulatedMachine, dtype: torch.dtype, share: float) -> None:
    with machine.kernels:
        a, b = torch.zeros(4096, 4096, dtype=dtype), torch.zeros(4096, 4096, dtype=dtype)
        machine.clock.finish()
        before = machine.clock.host_ns
        _ = a @ b
    assert kernel_s(machine, before) == pytest.approx(2 * 4096**3 / (100e12 * share) + GPU.launch_s, rel=1e-4)


def test_an_element_wise_kernel_takes_its_bytes(machine: SimulatedMachine) -> None:
    with machine.kernels:
        x = torch.zeros(1 << 28, dtype=torch.bfloat16)
        machine.clock.finish()
        before = machine.clock.host_ns
        _ = x * 2
    assert kernel_s(machine, before) == pytest.approx(2 * 2 * (1 << 28) / 1e12 + GPU.launch_s, rel=1e-3)


def test_allocations_and_views_launch_nothing_and_views_take_no_memory(machine: SimulatedMachine) -> None:
    with machine.kernels:
        start = machine.clock.host_ns
        x = torch.empty(1024, 1024)
        assert machine.clock.host_ns == start
        assert machine.memory.used == 4 << 20
        before, used = (machine.clock.host_ns, machine.clock.compute_ns), machine.memory.used
        y = x.view(-1)[5:]
        assert (machine.clock.host_ns, machine.clock.compute_ns) == before
        assert machine.memory.used == used
        del x
        assert machine.memory.used == used  # the view keeps the storage
        del y
    assert machine.memory.used == 0


def test_attention_takes_half_of_its_square_forward_and_five_products_for_two_backward(
    machine: SimulatedMachine,
) -> None:
    heads, tokens, width = 8, 4096, 128
    shape = (1, heads, tokens, width)
    flops = 4 * heads * tokens * tokens * width / 2  # two products, of which causal attention needs half
    with machine.kernels:
        q, k, v = (torch.zeros(shape, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
        machine.clock.finish()
        before = machine.clock.host_ns
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        assert kernel_s(machine, before) == pytest.approx(flops / 50e12, rel=0.02)
        gradient = torch.zeros_like(out)
        machine.clock.finish()
        before = machine.clock.host_ns
        torch.autograd.grad(out, (q, k, v), gradient)
    assert kernel_s(machine, before) == pytest.approx(5 / 2 * flops / 50e12, rel=0.02)


def test_reading_a_value_waits_for_the_device_and_needs_a_number(machine: SimulatedMachine) -> None:
    with machine.kernels, pytest.raises(RecordError, match="--assume"):
        (torch.rand(8) @ torch.rand(8)).item()
    assumed = SimulatedMachine(GPU, assume=3.0)
    with assumed.kernels:
        x = torch.zeros(4096, 4096, dtype=torch.bfloat16)
        assert (x @ x).sum().item() == 3.0
    assert assumed.clock.host_ns >= assumed.clock.compute_ns


def test_a_launch_takes_the_time_that_the_machine_has() -> None:
    taken = []
    for launch_s in (5e-6, 50e-6):
        machine = SimulatedMachine(dataclasses.replace(GPU, launch_s=launch_s))
        with machine.kernels:
            x = torch.zeros(8)
            before = machine.clock.host_ns
            x.add_(1.0)
        taken.append(machine.clock.host_ns - before)
    assert taken == [5_000, 50_000]
