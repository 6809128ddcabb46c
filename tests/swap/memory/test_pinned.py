"""The pinned slab over the stand-in for torch.cuda: bytes locked once, none leaked, copies within one registration."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from typing import TYPE_CHECKING, Any

import pytest
import torch
from small_models import assert_equal, ids, stack, train
from standin_cuda import OnHostMemory, StandinCuda

from memo.errors import SwapError
from memo.manager import Manager
from memo.swap import Engine, RecomputePolicy, find_layers, setting_of
from memo.swap.backends.cuda import CudaStream
from memo.swap.memory.pinned import PinnedSlab
from memo.swap.tiers import HostTier
from memo.swap.tiers.host_and_disk import PAGE

if TYPE_CHECKING:
    from collections.abc import Iterator

DEVICE = torch.device("cuda", 0)
SEGMENT = 1 << 15


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandinCuda]:
    cuda = StandinCuda(monkeypatch)
    yield cuda
    gc.collect()
    assert cuda.locked == {}, "pages stay locked"


def managed(model: torch.nn.Module, alpha: float) -> tuple[Manager, HostTier]:
    backend = OnHostMemory()
    tier = HostTier(backend, 1 << 24, segment_bytes=SEGMENT)
    engine = Engine(backend, [tier], min_bytes=512)
    return Manager(model, find_layers(model), engine, recompute_policy=RecomputePolicy(engine, setting_of(alpha))), tier


@pytest.mark.parametrize("alpha", [1.0, 0.25])
def test_pages_are_locked_once_and_in_the_first_step(cuda: StandinCuda, alpha: float) -> None:
    reference = stack(layers=4)
    want = train(reference, lambda step: reference(ids(step)), steps=6)
    model = stack(layers=4)
    manager, tier = managed(model, alpha)
    locked = []

    def loss(step: int) -> torch.Tensor:
        locked.append(cuda.locked_ever)
        return model(ids(step))

    assert_equal(train(model, loss, manager, steps=6), want)
    locked.append(cuda.locked_ever)
    assert locked[0] == 0
    assert locked[1] > 0
    assert locked[1:] == locked[1:2] * 6
    assert tier.peak <= tier.reserved <= tier.peak + tier.peak // 20 + SEGMENT
    assert tier.reserved == sum(cuda.locked.values())
    manager.close()


def test_a_plan_that_needs_more_locks_the_difference(cuda: StandinCuda) -> None:
    tier = HostTier(OnHostMemory(), 1 << 20, segment_bytes=PAGE)
    extent = tier.reserve(10 * PAGE)
    assert extent is not None
    extent.tier.release(extent)
    tier.end_step()
    tier.expect(40 * PAGE)
    extent = tier.reserve(40 * PAGE)
    assert extent is not None
    assert cuda.locked_ever == 40 * PAGE
    extent.tier.release(extent)
    tier.close()


def test_a_storage_may_lie_in_several_locked_pieces(cuda: StandinCuda) -> None:
    """The stand-in refuses a copy that spans two of them, as the driver does."""
    backend = OnHostMemory()
    slab = PinnedSlab(8 * PAGE, DEVICE, piece_bytes=PAGE)
    slab.grow(8 * PAGE)
    slab.wait(8 * PAGE)
    source = torch.arange(5 * PAGE).to(torch.uint8)
    back = torch.zeros_like(source)
    block = slab.memory[PAGE // 2 : PAGE // 2 + source.numel()]
    for target, given in ((block, source), (back, block)):
        stream = backend.d2h
        assert isinstance(stream, CudaStream)
        stream.copy(target, given).synchronize()
    assert torch.equal(back, source)
    slab.close()


def test_what_is_refused_is_raised_where_it_is_needed_and_what_was_given_serves(cuda: StandinCuda) -> None:
    cuda.lock_limit = 4 * PAGE
    slab = PinnedSlab(8 * PAGE, DEVICE, piece_bytes=PAGE)
    slab.grow(8 * PAGE)
    slab.wait(3 * PAGE)
    with pytest.raises(SwapError, match=r"^cannot pin 4 KiB of host memory beside 16 KiB .* lower the host budget.*$"):
        slab.wait(5 * PAGE)
    assert slab.nbytes == 4 * PAGE
    assert cuda.last_error == 0
    slab.wait(4 * PAGE)
    cuda.lock_limit = None
    slab.grow(8 * PAGE)
    slab.wait(8 * PAGE)
    assert cuda.locked_ever == 8 * PAGE
    slab.close()


def test_an_arena_that_cannot_be_locked_is_counted_nowhere_and_the_next_step_works(cuda: StandinCuda) -> None:
    reference = stack(layers=4)
    want = train(reference, lambda step: reference(ids(step)))
    model = stack(layers=4)
    manager, tier = managed(model, 1.0)
    cuda.lock_limit = 0
    with pytest.raises(SwapError, match="pin"), manager:
        model(ids())
    assert (tier.used, tier.reserved, manager.stats.live_entries) == (0, 0, 0)
    assert tier._space.used == 0
    cuda.lock_limit = None
    model.zero_grad()
    assert_equal(train(model, lambda step: model(ids(step)), manager), want)
    manager.close()


def test_the_end_that_is_given_back_is_unlocked_and_may_be_locked_again(cuda: StandinCuda) -> None:
    slab = PinnedSlab(8 * PAGE, DEVICE, piece_bytes=2 * PAGE)
    slab.grow(8 * PAGE)
    slab.wait(8 * PAGE)
    slab.shrink(3 * PAGE)
    assert slab.nbytes == sum(cuda.locked.values()) == 4 * PAGE
    slab.grow(8 * PAGE)
    slab.wait(8 * PAGE)
    assert sum(cuda.locked.values()) == 8 * PAGE
    slab.close()


def test_closing_while_pages_are_locked_ends_with_the_piece_under_way(cuda: StandinCuda) -> None:
    locking, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        locking.set()
        go_on.wait()

    cuda.at_lock = hold
    slab = PinnedSlab(8 * PAGE, DEVICE, piece_bytes=PAGE)
    slab.grow(8 * PAGE)
    raised: list[BaseException] = []

    def use() -> None:
        try:
            slab.wait(8 * PAGE)
        except SwapError as error:
            raised.append(error)

    threads = [threading.Thread(target=work) for work in (use, slab.close)]
    assert locking.wait(60)
    for thread in threads:
        thread.start()
    while not slab._closed:
        time.sleep(0.001)
    go_on.set()
    for thread in threads:
        thread.join()
    assert cuda.locked_ever == PAGE
    assert [str(error) for error in raised] == ["host memory was requested after the manager was closed"]


def test_pages_stay_locked_while_somebody_has_a_view_of_them(cuda: StandinCuda) -> None:
    slab = PinnedSlab(8 * PAGE, DEVICE)
    slab.grow(8 * PAGE)
    slab.wait(8 * PAGE)
    view: Any = slab.memory[PAGE:]
    slab.close()
    gone = weakref.ref(slab)
    del slab
    gc.collect()
    assert gone() is None
    assert sum(cuda.locked.values()) == 8 * PAGE
    del view
