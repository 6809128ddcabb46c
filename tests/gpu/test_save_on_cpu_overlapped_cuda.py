"""examples/save_on_cpu_overlapped.py on a GPU: the same bits as without it, in fewer bytes, on one stream or several."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from run_examples import example
from small_models import Stack
from torch import Tensor

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA GPU")]

MIB = 1 << 20
SIDE = 512  # a square of it in float32 has 1 MiB

module = example("save_on_cpu_overlapped")


@pytest.fixture(autouse=True)
def _repeatable() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def offloading(host_bytes: int = 64 * MIB, *, window_bytes: int) -> Any:
    return module.save_on_cpu_overlapped(host_bytes, min_bytes=1, window_bytes=window_bytes)


def is_empty(stats: Any) -> bool:
    return (stats.live, stats.host_bytes, stats.device_bytes) == (0, 0, 0)


def square(seed: int = 0) -> Tensor:
    return torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(seed)).cuda().requires_grad_()


def chain(leaf: Tensor, around: Any, length: int = 12) -> Tensor:
    x = leaf * 1
    with around:
        for _ in range(length):
            x = x.sin() * 2  # each sine saves 1 MiB
    return x.sum()


@pytest.mark.parametrize("window_bytes", [0, 64 << 10, 64 * MIB])
def test_a_model_trains_to_the_same_bits(window_bytes: int) -> None:
    ids = torch.randint(61, (2, 48), generator=torch.Generator().manual_seed(0)).cuda()

    def train(around: Any) -> list[Tensor]:
        torch.manual_seed(1)
        model = Stack(4, 64).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(3):
            with around, torch.autocast("cuda", torch.bfloat16):
                loss = model(ids)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        return losses + [parameter.detach() for parameter in model.parameters()]

    offload = offloading(window_bytes=window_bytes)
    assert all(map(torch.equal, train(contextlib.nullcontext()), train(offload)))
    assert offload.stats.bytes_in > 0 or window_bytes
    assert is_empty(offload.stats)


@pytest.mark.parametrize("window", [0, 2, 5])
def test_device_memory_is_the_windows(window: int) -> None:
    leaf, offload = square(), offloading(window_bytes=window * MIB)
    plain = torch.autograd.grad(chain(leaf, contextlib.nullcontext()), leaf)[0]
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss = chain(leaf, offload)
    assert torch.cuda.memory_allocated() - before <= (window + 1) * MIB + 4096  # with the loss
    (found,) = torch.autograd.grad(loss, leaf)
    # What the window holds of sources and of reloads ahead, and six of the operators at work.
    assert torch.cuda.max_memory_allocated() - before <= (2 * window + 6) * MIB
    assert torch.equal(plain, found)
    del loss
    assert is_empty(offload.stats)


@pytest.mark.parametrize("window", [0, 3])
def test_forwards_on_several_streams(window: int) -> None:
    """Two chains on streams of their own in turn, whose host memory is that of the other's step before."""
    leaves, offload = [square(seed) for seed in range(2)], offloading(13 * MIB, window_bytes=window * MIB)
    plain = [torch.autograd.grad(chain(leaf, contextlib.nullcontext()), leaf)[0] for leaf in leaves]
    streams = [torch.cuda.Stream() for _ in leaves]
    torch.cuda.synchronize()
    for turn in range(6):
        stream, leaf = streams[turn % 2], leaves[turn % 2]
        with torch.cuda.stream(stream):
            (found,) = torch.autograd.grad(chain(leaf, offload), leaf)
        stream.synchronize()
        assert torch.equal(found, plain[turn % 2])
    assert is_empty(offload.stats)


def test_a_graph_dropped_amid_its_backward_leaves_no_copy_behind() -> None:
    """Its reloads ahead, which nothing has waited for, write into no memory that others have by then."""
    leaf, offload = square(), offloading(window_bytes=4 * MIB)
    for _ in range(3):
        x = leaf * 1
        kept = []
        with offload:
            for _ in range(10):
                x = x.sin()
                kept.append(x)
        offload._engine._trim(offload._engine._leaving, 0, offload._engine._free_source)
        saved = kept[-1].grad_fn._saved_self  # type: ignore[union-attr]
        assert torch.equal(saved, kept[-2])
        assert offload.stats.device_bytes == 5 * MIB
        del x, kept, saved
        others = [torch.full((SIDE, SIDE), 7.0, device="cuda") for _ in range(16)]
        torch.cuda.synchronize()
        assert all(bool((other == 7).all()) for other in others)
    gc.collect()
    assert is_empty(offload.stats)
