"""The swap engine on a real GPU: the same promises as on the CPU, under real streams. Run by `make gpu-check`."""

from __future__ import annotations

import gc
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
import torch
from small_models import Step, assert_equal, gradients

import memo
from memo.autoplan.device_peaks import DevicePeaks
from memo.gpt import preset
from memo.gpt.model import GPT

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from torch import nn

pytestmark = pytest.mark.gpu
VOCAB = 512


@pytest.fixture(autouse=True)
def _deterministic() -> Iterator[None]:
    """Attention's backward adds by atomics otherwise, also with `warn_only`, and no two runs agree to the last bit."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def device() -> torch.device:
    if not torch.cuda.is_available():
        pytest.skip("no CUDA GPU")
    return torch.device("cuda")


def make(device: torch.device, variant: str = "gpt", dtype: torch.dtype = torch.bfloat16, **overrides: Any) -> GPT:
    torch.manual_seed(0)
    config = preset("tiny", variant=variant, vocab_size=VOCAB, max_seq=4096, **overrides)
    return GPT(config).to(device=device, dtype=dtype)


def steps(model: nn.Module, device: torch.device, manager: Any = None, count: int = 3, seq: int = 1024) -> list[Step]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    done = []
    for number in range(count):
        ids = torch.randint(0, VOCAB, (2, seq + 1), generator=torch.Generator().manual_seed(number)).to(device)
        if manager is None:
            loss = model(ids[:, :-1], ids[:, 1:])
        else:
            with manager:
                loss = model(ids[:, :-1], ids[:, 1:])
        loss.backward()
        done.append(Step(loss.detach().clone(), gradients(model)))
        optimizer.step()
        optimizer.zero_grad()
    return done


TIERS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "host": lambda path: {"host": "2GiB"},
    "disk": lambda path: {"host": 0, "disk": path},
    "both": lambda path: {"host": "8MiB", "disk": path},
}


@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("variant", ["gpt", "llama"])
def test_gradients_are_equal(variant: str, dtype: torch.dtype, tier: str, device: torch.device, tmp_path: Path) -> None:
    want = steps(make(device, variant, dtype), device)
    again = steps(make(device, variant, dtype), device)
    assert_equal(again, want)  # the comparison means something only where the plain run repeats itself
    model = make(device, variant, dtype)
    manager = memo.offload(model, alpha=1.0, **TIERS[tier](tmp_path))
    assert_equal(steps(model, device, manager), want)
    gc.collect()
    assert manager.stats.live_entries == 0
    assert manager.stats.bytes_host + manager.stats.bytes_disk > 0
    manager.close()


def test_gradients_are_equal_on_a_stream_of_the_users(device: torch.device) -> None:
    want = steps(make(device), device)
    model = make(device)
    manager = memo.offload(model, alpha=1.0, host="2GiB")
    stream = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        got = steps(model, device, manager)
    stream.synchronize()
    assert_equal(got, want)
    manager.close()


@pytest.mark.parametrize("slow", ["compute", "d2h", "h2d"])
def test_gradients_are_equal_when_one_stream_lags(slow: str, device: torch.device) -> None:
    want = steps(make(device), device)
    model = make(device)
    manager = memo.offload(model, alpha=1.0, host="2GiB")
    backend: Any = manager._engine.backend
    stream = {"d2h": backend.d2h.stream, "h2d": backend.h2d.stream}.get(slow)

    def lag(*_: object) -> None:
        with torch.cuda.stream(stream or torch.cuda.current_stream(device)):
            torch.cuda._sleep(20_000_000)  # about ten milliseconds

    hooks = [layer.register_forward_pre_hook(lag) for layer in model.layers]
    hooks += [layer.register_full_backward_hook(lag) for layer in model.layers]
    assert_equal(steps(model, device, manager), want)
    for hook in hooks:
        hook.remove()
    manager.close()


# A product over part of the rows may run through another kernel, which adds in another order: a few roundings of float32,
# summed over some thousand tokens. A wrong token is off by about 1.
ROUNDINGS = 1e-4


def assert_equal_to_rounding(got: list[Step], want: list[Step]) -> None:
    for ours, theirs in zip(got, want, strict=True):
        for a, b in zip(ours.gradients, theirs.gradients, strict=True):
            assert a is not None
            assert b is not None
            assert (a - b).norm() <= ROUNDINGS * b.norm()


@pytest.mark.parametrize("alpha", [0.0, 0.25, (0.25, 0.5, 0.25)], ids=str)
def test_recomputed_tokens_are_right_to_rounding(alpha: Any, device: torch.device) -> None:
    """Two rows a batch, so that heads are gathered and scattered by the kernels."""
    want = steps(make(device, dtype=torch.float32), device, count=2, seq=2048)
    model = make(device, dtype=torch.float32)
    manager = memo.offload(model, alpha=alpha, host="2GiB")
    assert_equal_to_rounding(steps(model, device, manager, count=2, seq=2048), want)
    assert manager.stats.bytes_recomputed > 0
    assert not manager.report().recompute.refused  # type: ignore[union-attr]
    manager.close()


def test_the_automatic_plan_measures_and_plans(device: torch.device) -> None:
    want = steps(make(device, dtype=torch.float32), device, count=8, seq=1024)
    model = make(device, dtype=torch.float32)
    manager = memo.offload(model, host="2GiB")
    assert_equal_to_rounding(steps(model, device, manager, count=8, seq=1024)[:1], want[:1])  # later ones have drifted
    assert manager.plan is not None
    assert manager.plan.declined  # everything fits
    manager.close()


def test_a_layers_edge_reads_torchs_counters_once_and_sorts_none(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`torch.cuda.memory_stats` names and sorts some hundred figures, twice an edge within the steps that are measured."""
    calls: Counter[str] = Counter()

    def count(owner: Any, name: str) -> None:
        real = getattr(owner, name)

        def counted(*arguments: Any) -> Any:
            calls[name] += 1
            return real(*arguments)

        monkeypatch.setattr(owner, name, counted)

    model = make(device)
    manager = memo.offload(model)
    count(torch.cuda, "memory_stats")
    count(torch.cuda.memory, "memory_stats")
    count(torch._C, "_cuda_memoryStats")
    count(torch._C, "_cuda_resetPeakMemoryStats")
    count(DevicePeaks, "_begin")
    steps(model, device, manager, count=4)
    manager.close()
    edges, beside = calls["_begin"], 20  # beside the boundaries: a few readings a step
    assert edges > 2 * beside
    assert calls["memory_stats"] == 0
    assert edges <= calls["_cuda_memoryStats"] <= edges + beside
    assert edges <= calls["_cuda_resetPeakMemoryStats"] <= edges + beside


def test_memory_does_not_grow_over_fifty_steps(device: torch.device) -> None:
    model = make(device)
    manager = memo.offload(model, alpha=1.0, host="2GiB")

    def run(count: int) -> None:
        for _ in range(count):
            steps(model, device, manager, count=1)  # one at a time: it keeps the gradients of each

    run(5)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run(5)
    peak = torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    run(50)
    assert torch.cuda.memory_allocated(device) <= before + (1 << 20)
    assert torch.cuda.max_memory_allocated(device) <= 1.02 * peak + (1 << 20)
    manager.close()


def test_device_peak_falls(device: torch.device) -> None:
    def peak(manager_of: Callable[[GPT], Any]) -> int:
        before = torch.cuda.memory_allocated(device)
        model = make(device, layers=16, hidden=512, heads=8)
        manager = manager_of(model)
        steps(model, device, manager, count=1, seq=4096)
        torch.cuda.reset_peak_memory_stats(device)
        steps(model, device, manager, count=1, seq=4096)
        return torch.cuda.max_memory_allocated(device) - before

    assert peak(lambda model: memo.offload(model, alpha=1.0, host="8GiB")) < 0.5 * peak(lambda model: None)


def test_the_host_arena_is_exact_to_the_page(device: torch.device) -> None:
    from memo.swap import empty_pinned

    memory = empty_pinned(3 * 4096)
    assert memory.numel() == 3 * 4096
    assert memory.is_pinned()


def test_a_copy_over_several_registrations_is_whole(device: torch.device) -> None:
    from memo.swap.backends import CudaBackend
    from memo.swap.memory.pinned import PinnedSlab

    slab = PinnedSlab(1 << 20, device, piece_bytes=1 << 16)
    slab.grow(1 << 20)
    slab.wait(1 << 20)
    assert all(slab.memory[start:].is_pinned() for start in range(0, 1 << 20, 1 << 16))
    backend = CudaBackend(device)
    source = torch.arange(1 << 18, device=device).to(torch.uint8)
    block = slab.memory[12345 : 12345 + source.numel()]
    backend.d2h.wait(backend.compute_event())
    backend.h2d.wait(backend.d2h.copy(block, source))
    back = torch.zeros_like(source)
    backend.h2d.wait(backend.compute_event())
    backend.h2d.copy(back, block).synchronize()
    assert torch.equal(back, source)
    backend.close()
    slab.close()


def test_host_memory_is_locked_in_the_first_step_alone(device: torch.device) -> None:
    model = make(device)
    manager = memo.offload(model, alpha=1.0, host="2GiB")
    tier: Any = manager._engine.tiers[0]
    reserved = []
    for _ in range(4):
        steps(model, device, manager, count=1)
        reserved.append(tier.reserved)
    assert reserved[0] > 0
    assert len(set(reserved)) == 1
    assert tier._slab.memory[: reserved[0]].is_pinned()
    manager.close()


def test_a_trace_orders_copies_inside_the_step(device: torch.device, tmp_path: Path) -> None:
    import json

    model = make(device)
    path = tmp_path / "trace.rank0.jsonl"
    manager = memo.offload(model, alpha=1.0, host="2GiB", trace=path)
    steps(model, device, manager, count=2)
    torch.cuda.synchronize()
    manager.step_done()
    manager.close()
    events = [json.loads(line) for line in path.read_text().splitlines()]
    lanes = {event["lane"] for event in events if event.get("k") == "span"}
    assert {"compute", "d2h", "h2d"} <= lanes
    assert all(event["d"] >= 0 for event in events if event.get("k") == "span")
