"""The CUDA backend's own code over a stand-in for torch.cuda: what it orders, on which stream, and what it gives back."""

from __future__ import annotations

import gc
import mmap
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from small_models import assert_equal, ids, stack, train
from standin_cuda import OnHostMemory, StandinCuda, Stream

from memo.errors import SwapError
from memo.manager import Manager
from memo.swap import Engine, RecomputePolicy, empty_pinned, find_layers, setting_of
from memo.swap.backends import copy_stream
from memo.swap.backends.cuda import CudaStream
from memo.swap.disk import DiskStore, StagedDisk
from memo.swap.tiers import DiskTier, HostTier

if TYPE_CHECKING:
    from memo.swap.tiers import Tier

LAYERS = 4


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> StandinCuda:
    return StandinCuda(monkeypatch)


def managed(model: torch.nn.Module, tier: str, alpha: float, directory: Path) -> tuple[Manager, OnHostMemory]:
    backend = OnHostMemory(timing=True)
    tiers: list[Tier]
    if tier == "host":
        tiers = [HostTier(backend, 1 << 24, segment_bytes=1 << 20)]
    else:
        store = DiskStore([directory], 1 << 24)
        device = torch.device("cuda", 0)
        staged = StagedDisk(
            store, copy_stream(device), copy_stream(device), empty_pinned, block_bytes=1 << 14, blocks=3
        )
        tiers = [DiskTier(staged, 1 << 24)]
    engine = Engine(backend, tiers, min_bytes=512)
    return Manager(
        model, find_layers(model), engine, recompute_policy=RecomputePolicy(engine, setting_of(alpha))
    ), backend


@pytest.mark.promise("R10")
@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("alpha", [1.0, 0.25])
def test_gradients_are_equal_over_streams_that_put_everything_off(
    tier: str, alpha: float, cuda: StandinCuda, tmp_path: Path
) -> None:
    reference = stack(layers=LAYERS)
    want = train(reference, lambda step: reference(ids(step)))
    model = stack(layers=LAYERS)
    manager, backend = managed(model, tier, alpha, tmp_path)
    assert_equal(train(model, lambda step: model(ids(step)), manager), want)
    copies = [stream.copies for stream in cuda.streams]
    if tier == "host":
        assert min(copies[:2]) > 0  # out and in, each on a stream of its own
        assert backend.d2h.stream is not backend.h2d.stream
    else:
        assert min(copies[2:]) > 0
    manager.close()
    assert manager.stats.live_entries == 0
    del manager, backend
    gc.collect()
    assert cuda.locked == {}  # pages are unlocked when their memory goes


def test_copies_of_a_traced_run_tell_when_they_ran(cuda: StandinCuda) -> None:
    stream = OnHostMemory(timing=True).d2h
    copied = stream.copy(torch.empty(8), torch.ones(8))
    assert copied.interval_ns() is None
    cuda.now_ms = 5.0
    copied.synchronize()
    interval = copied.interval_ns()
    assert interval is not None
    assert interval[0] == interval[1]


def test_who_waits_for_a_copy_sleeps(cuda: StandinCuda) -> None:
    copied = CudaStream(torch.device("cuda", 0), None).copy(torch.empty(8), torch.ones(8))
    event: Any = copied._event
    assert event.blocking


def test_spans_stay_exact_over_a_day_though_the_driver_counts_in_floats(cuda: StandinCuda) -> None:
    backend = OnHostMemory(timing=True)
    span_ms = 3.0
    for minute in range(1, 24 * 60):
        cuda.now_ms = minute * 60_001.37  # no multiple of a power of two
        begin = backend.stamp().ns()
        cuda.now_ms += span_ms
        end = backend.stamp().ns()
        assert begin is not None
        assert end is not None
        assert abs((end - begin) / 1e6 - span_ms) < 0.01


@pytest.fixture
def waits(monkeypatch: pytest.MonkeyPatch) -> list[Stream]:
    """The streams that were told to wait for an event."""
    told: list[Stream] = []
    wait_event = Stream.wait_event

    def waiting(stream: Stream, event: Any) -> None:
        told.append(stream)
        wait_event(stream, event)

    monkeypatch.setattr(Stream, "wait_event", waiting)
    return told


def test_a_lane_waits_once_for_an_event(cuda: StandinCuda, waits: list[Stream]) -> None:
    backend = OnHostMemory()
    first, second = backend.compute_event(), backend.compute_event()
    for event in (first, first, second, second):
        backend.d2h.wait(event)
    assert waits == [backend.d2h.stream] * 2
    backend.h2d.wait(second)
    assert waits[2:] == [backend.h2d.stream]


def test_a_stream_that_has_waited_for_a_copy_does_not_wait_for_an_earlier_one(
    cuda: StandinCuda, waits: list[Stream]
) -> None:
    backend = OnHostMemory()
    targets = [torch.zeros(8) for _ in range(3)]
    copies = [backend.d2h.copy(target, torch.ones(8)) for target in targets]
    backend.compute_wait(copies[1])
    backend.compute_wait(copies[0])
    backend.compute_wait(copies[1])
    assert waits == [cuda.compute]
    assert [bool(target.all()) for target in targets] == [True, True, False]
    backend.compute_wait(copies[2])
    assert waits == [cuda.compute] * 2
    assert targets[2].all()
    back = backend.h2d.copy(targets[0], torch.zeros(8))
    backend.compute_wait(back)  # of another lane
    assert not targets[0].any()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # which has not waited yet
        backend.compute_wait(copies[0])
    assert waits[3:] == [side]


def test_a_layer_is_released_after_one_wait(cuda: StandinCuda, waits: list[Stream], tmp_path: Path) -> None:
    model = stack(layers=LAYERS)
    manager, backend = managed(model, "host", 1.0, tmp_path)
    with manager:
        loss = model(ids())
    assert backend.d2h.stream.copies > 5 * (LAYERS - 1)
    assert waits.count(cuda.compute) == LAYERS - 1  # the last layer is not released before backward
    del loss
    manager.close()


def test_a_buffer_used_on_another_stream_is_kept_for_it(cuda: StandinCuda) -> None:
    backend = OnHostMemory()
    buffer = backend.empty(64)
    backend.compute_uses(buffer)
    assert cuda.recorded == []
    side = Stream(cuda)
    with torch.cuda.stream(side):  # type: ignore[arg-type]
        backend.compute_uses(buffer[8:])
    assert cuda.recorded == [side]


class Silent:
    """A tracer that forgets."""

    stacks = False

    step = 0

    def now(self) -> int:
        return 0

    def at(self, monotonic_ns: int) -> int:
        return monotonic_ns

    def emit(self, event: object) -> None:
        return None


@pytest.mark.parametrize("alpha", [1.0, 0.25])
def test_the_profiler_is_shown_layers_copies_and_recomputes_of_a_traced_step(
    alpha: float, cuda: StandinCuda, tmp_path: Path
) -> None:
    model = stack(layers=LAYERS)
    manager, _ = managed(model, "host", alpha, tmp_path)
    train(model, lambda step: model(ids(step)), manager, steps=1)
    assert cuda.ranges == []  # nobody listens
    manager._engine.listen(Silent())
    train(model, lambda step: model(ids(step)), manager, steps=1)
    manager.step_done()
    assert cuda.open_ranges == {}
    shown = set(cuda.ranges)
    for layer in range(LAYERS):
        assert {f"forward layers.{layer}", f"backward layers.{layer}"} <= shown
    assert {"d2h layers.0", "h2d layers.0"} <= shown
    assert ("recompute layers.0" in shown) == (alpha < 1)
    manager.close()


def test_a_forward_under_capture_is_left_alone_and_says_so_once(cuda: StandinCuda, tmp_path: Path) -> None:
    model = stack(layers=LAYERS)
    manager, _ = managed(model, "host", 1.0, tmp_path)
    with manager:
        before = model(ids(0))  # its copies are under way when the capture begins, and when its graph dies
    cuda.capturing = True
    del before
    gc.collect()
    with pytest.warns(RuntimeWarning, match="CUDA graph is being captured") as said, manager:
        model(ids(1)).backward()
    with manager:
        model(ids(2)).backward()
    assert len(said) == 1
    cuda.capturing = False
    packed = manager.stats.packed
    reference = stack(layers=LAYERS)
    model.zero_grad()
    got = train(model, lambda step: model(ids(step)), manager)
    assert_equal(got, train(reference, lambda step: reference(ids(step))))
    assert manager.stats.packed > packed
    manager.close()
    assert manager.stats.live_entries == 0


@pytest.mark.parametrize("name", ["down", "out"])  # saves a storage for the first time; one that was saved before
def test_what_a_layer_saves_while_it_captures_stays_on_the_device(name: str, cuda: StandinCuda, tmp_path: Path) -> None:
    model = stack(layers=LAYERS)
    manager, _ = managed(model, "host", 1.0, tmp_path)

    def capture(module: torch.nn.Module, args: object, output: object = None) -> None:
        cuda.capturing = output is None

    projection = getattr(model.layers[1], name)
    hooks = projection.register_forward_pre_hook(capture), projection.register_forward_hook(capture)
    with pytest.warns(RuntimeWarning, match="CUDA graph is being captured"), manager:
        loss = model(ids(0))
    for hook in hooks:
        hook.remove()
    loss.backward()
    reference = stack(layers=LAYERS)
    reference(ids(0)).backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]
    manager.close()


def test_pages_that_cannot_be_locked_are_an_error_that_no_later_kernel_is_blamed_for(cuda: StandinCuda) -> None:
    cuda.lock_limit = 1 << 20
    held = empty_pinned(1 << 20)
    with pytest.raises(SwapError, match="lower the host budget"):
        empty_pinned(1 << 12)
    assert cuda.last_error == 0
    address = held.data_ptr()
    assert cuda.locked == {address: 1 << 20}
    del held
    assert cuda.locked == {}


@pytest.mark.skipif(not hasattr(mmap, "MADV_DONTFORK"), reason="Linux alone has it")
def test_a_forked_worker_does_not_get_the_locked_pages(cuda: StandinCuda) -> None:
    """The kernel would copy them all at the fork: a data loader's workers would each take the host budget once more."""
    memory = empty_pinned(1 << 20)
    address = memory.data_ptr()

    def is_mapped() -> bool:
        ranges = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
        return any(int(first, 16) <= address < int(last, 16) for first, last in ranges)

    assert is_mapped()
    child = os.fork()
    if child == 0:
        os._exit(int(is_mapped()))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
