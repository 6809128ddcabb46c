"""Every disk operation of a three-step run fails in turn: equal gradients or the named error, and the next step works."""

from __future__ import annotations

import contextlib
import errno
import gc
import mmap
import os
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from faulty_file import Faults
from small_models import Stack, assert_equal, ids, stack, train
from torch import nn

from memo.errors import CorruptBlock, ScratchFull, StoreReadError, StoreWriteError
from memo.manager import Manager
from memo.swap import Engine, WhenFull, find_layers
from memo.swap.backends import CpuBackend
from memo.swap.disk import DiskStore
from memo.swap.tiers import DiskTier, HostTier

if TYPE_CHECKING:
    from pathlib import Path

    from memo.swap.tiers import Tier


class Small(nn.Module):
    """Two storages a layer: few enough that each operation can be failed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(x))


def model() -> Stack:
    return stack(make=Small)


def manage(
    module: nn.Module,
    directory: Path,
    faults: Faults,
    *,
    host: int = 0,
    when_full: WhenFull = WhenFull.SPILL,
    **options: Any,
) -> Manager:
    backend = CpuBackend()
    store = DiskStore([directory], 1 << 20, block_bytes=1 << 14, open_file=faults.open, **options)
    tiers: list[Tier] = [DiskTier(store, 1 << 20)]
    if host:
        tiers.append(HostTier(backend, host))
    return Manager(module, find_layers(module), Engine(backend, tiers, min_bytes=4096, when_full=when_full))


def three_steps(module: Stack, manager: Manager | None = None) -> Any:
    return train(module, lambda step: module(ids(step)), manager)


def one_step(module: Stack, manager: Manager | None) -> Any:
    return train(module, lambda step: module(ids(step)), manager, steps=1)


def flush_autograd() -> None:
    """After an exception in backward, autograd's queue holds what it had not reached until the next backward."""
    torch.ones(1, requires_grad=True).sum().backward()
    gc.collect()


FAULTS: dict[str, dict[str, Any]] = {
    "ENOSPC": {"errno": errno.ENOSPC},
    "EIO": {"errno": errno.EIO},
    "EINTR": {"errno": errno.EINTR},
    "short": {"short": 4096},
    "nothing": {"short": 0},
    "slow": {"delay": 0.02},
}


CASES = [(operation, kind, 0) for operation in ("write", "read") for kind in FAULTS]
CASES += [("write", "ENOSPC", 1 << 20), ("write", "EIO", 1 << 20)]


@pytest.mark.parametrize(("operation", "kind", "host"), CASES)
def test_each_operation_failed_in_turn(operation: Any, kind: str, host: int, tmp_path: Path) -> None:
    want = three_steps(model())
    descriptors = len(os.listdir("/proc/self/fd"))
    named_error = StoreWriteError if operation == "write" else StoreReadError
    nth, raised = 0, 0
    while True:
        nth += 1
        faults = Faults().fail(operation, nth, **FAULTS[kind], sticky=kind in ("ENOSPC", "EIO"))
        module = model()
        manager = manage(module, tmp_path, faults, host=host)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            try:
                got = three_steps(module, manager)
            except named_error as error:
                raised += 1
                named = errno.errorcode[FAULTS[kind].get("errno", errno.EIO)] in str(error)
            else:
                named = True
                assert_equal(got, want)
            assert named, "the message has the errno's name"
            flush_autograd()
            hit = faults.hits > 0
            faults._faults.clear()
            # The same manager works on once the disk does.
            module.load_state_dict(model().state_dict())
            module.zero_grad()
            assert_equal(one_step(module, manager), want[:1])
        flush_autograd()
        assert manager.stats.live_entries == 0
        manager.close()
        assert manager.stats.device_bytes == 0
        assert all(tier.used == 0 for tier in manager._engine.tiers)
        assert list(tmp_path.iterdir()) == []
        assert len(os.listdir("/proc/self/fd")) == descriptors
        if not hit:
            break
    assert nth >= 10, "a run has at least ten operations of each kind"
    if kind in ("EINTR", "short", "slow"):
        assert raised == 0, "what a correct program can wait out or resume is not an error"
    if operation == "write" and kind in ("ENOSPC", "EIO"):
        # With room on the host behind the disk the bytes go there; without, the error goes up.
        assert (raised == 0) == (host > 0)
    if operation == "read" and kind == "EIO":
        assert raised > 0


def test_a_failed_write_warns_once_and_is_counted(tmp_path: Path) -> None:
    module = model()
    manager = manage(module, tmp_path, Faults().fail("write", 1, errno=errno.ENOSPC, sticky=True), host=1 << 20)
    with pytest.warns(RuntimeWarning, match="ENOSPC") as caught:
        three_steps(module, manager)
    assert len(caught) == 1
    assert manager.stats.failed_writes > 1
    assert manager.stats.bytes_host > 0
    assert "failed disk writes" in str(manager.report())
    manager.close()


def test_a_run_that_plans_itself_keeps_what_a_full_disk_refuses_and_no_host_takes(tmp_path: Path) -> None:
    module = model()
    faults = Faults().fail("write", 3, errno=errno.ENOSPC, sticky=True)
    manager = manage(module, tmp_path, faults, when_full=WhenFull.STAY)
    with pytest.warns(RuntimeWarning, match="no room .* it stays on the device"):
        got = three_steps(module, manager)
    assert_equal(got, three_steps(model()))
    report = manager.report()
    assert manager.stats.failed_writes > 1
    assert report.stayed is not None
    assert "since the disk tier was full" in str(report)
    flush_autograd()
    assert manager.stats.device_bytes == manager.stats.live_entries == 0
    manager.close()


def test_on_full_raise_raises_although_the_host_has_room(tmp_path: Path) -> None:
    module = model()
    faults = Faults().fail("write", 1, errno=errno.ENOSPC)
    manager = manage(module, tmp_path, faults, host=1 << 20, when_full=WhenFull.RAISE)
    with pytest.raises(StoreWriteError, match="ENOSPC"):
        three_steps(module, manager)
    flush_autograd()
    manager.close()


def test_a_full_disk_budget_falls_back_to_the_host_or_raises_scratch_full(tmp_path: Path) -> None:
    want = three_steps(model())
    for host in (1 << 20, 0):
        module = model()
        backend = CpuBackend()
        tiers: list[Tier] = [DiskTier(DiskStore([tmp_path], 16384), 16384)]
        tiers += [HostTier(backend, host)] if host else []
        manager = Manager(module, find_layers(module), Engine(backend, tiers, min_bytes=4096))
        if host:
            assert_equal(three_steps(module, manager), want)
            assert manager.stats.spilled > 0
        else:
            with pytest.raises(ScratchFull, match=r"disk .* used of .*; raise the disk budget, or give host="):
                three_steps(module, manager)
            flush_autograd()
        manager.close()


def test_a_flipped_bit_on_disk_is_refused_when_verify_is_on(tmp_path: Path) -> None:
    module = model()
    faults = Faults()
    manager = manage(module, tmp_path, faults, verify=True)
    with manager:
        loss = module(ids())
    (file,) = faults.files
    block = mmap.mmap(-1, 4096)  # O_DIRECT takes aligned memory only
    block.write(b"\xa5" * 4096)
    os.pwrite(file.fd, block, 0)  # the forward has ended: the first layers are on disk
    with pytest.raises(CorruptBlock, match="are not the bytes that were written"):
        loss.backward()
    del loss
    flush_autograd()
    manager.close()


def test_a_stalled_disk_is_waited_for_and_counted(tmp_path: Path) -> None:
    module = model()
    manager = manage(module, tmp_path, Faults().fail("write", 1, delay=0.05, sticky=True))
    assert_equal(three_steps(module, manager), three_steps(model()))
    assert manager.stats.stall_s > 0.1
    manager.close()


@pytest.mark.filterwarnings("ignore:.*nothing was lost:RuntimeWarning")
@pytest.mark.parametrize("operation", ["write", "read"])
def test_a_step_that_ended_in_an_error_leaves_nothing_to_the_next_one(operation: Any, tmp_path: Path) -> None:
    """Without a garbage collection: else failed copies of the dead step would be raised in the next one."""
    want = one_step(model(), None)
    named_error = StoreWriteError if operation == "write" else StoreReadError
    module, faults = model(), Faults()
    manager = manage(module, tmp_path, faults)
    gc.collect()
    gc.disable()
    try:
        for nth in range(1, 7):
            faults.fail(operation, faults.calls[operation] + nth, errno=errno.EIO, sticky=True)
            with contextlib.suppress(named_error):
                one_step(module, manager)
            faults.clear()
            module.load_state_dict(model().state_dict())
            module.zero_grad()
            assert_equal(one_step(module, manager), want)
            assert manager.stats.live_entries == 0
    finally:
        gc.enable()
    manager.close()
