"""No host thread waits in the forward for a copy that only it could wait for, within the bytes that may be late."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from faulty_file import Faults
from race_checker import CheckingBackend, CheckingDisk
from small_models import Stack, assert_equal, checked as checked_on_host, ids, stack, train

from memo.errors import StoreWriteError
from memo.events import StallCause
from memo.manager import Manager
from memo.swap import Engine, Placement, find_layers
from memo.swap.backends import CpuBackend
from memo.swap.disk import DiskStore
from memo.swap.tiers import DiskTier

if TYPE_CHECKING:
    from pathlib import Path

    from memo.swap.backends import Event
    from memo.swap.engine.layer_calls import Group

LAYERS = 6
ROOM = 1 << 24
ENOUGH = 1 << 30


def checked(model: Stack, policy: Any, *, late: int | None) -> tuple[Manager, CheckingBackend]:
    backend = CheckingBackend(policy, hosted_disk=True)
    tiers = [DiskTier(CheckingDisk(backend, ROOM), ROOM)]
    engine = Engine(backend, tiers, min_bytes=512)
    engine.place({}, late_bytes=late)
    return Manager(model, find_layers(model), engine), backend


def plain() -> Any:
    model = stack(layers=LAYERS)
    return train(model, lambda step: model(ids(step)))


def stops_in_forward(policy: str, late: int | None) -> tuple[int, int]:
    """How often the host had to wait in one forward, and the most bytes that the device held."""
    model = stack(layers=LAYERS)
    manager, backend = checked(model, policy, late=late)
    with manager:
        loss = model(ids())
    stops, peak = backend.host_stops, manager.stats.peak_device_bytes
    loss.backward()
    manager.close()
    return stops, peak


@pytest.mark.parametrize("late", [0, None, ENOUGH])
@pytest.mark.parametrize("policy", ["lazy", "eager", "random"])
def test_gradients_are_equal_and_nothing_races_however_late_copies_may_be(policy: str, late: int | None) -> None:
    model = stack(layers=LAYERS)
    manager, backend = checked(model, policy, late=late)
    assert_equal(train(model, lambda step: model(ids(step)), manager), plain())
    assert backend.races == []
    manager.close()
    assert manager.stats.live_entries == 0
    assert manager.stats.device_bytes == 0
    assert manager._engine.tiers[0].used == 0


def test_the_host_stops_only_for_what_is_beyond_the_late_bytes() -> None:
    # Lazy copies never end by themselves: whatever has to go is waited for.
    at_once, two_layers = stops_in_forward("lazy", 0)
    one_later, three_layers = stops_in_forward("lazy", None)
    never, all_layers = stops_in_forward("lazy", ENOUGH)
    assert at_once > one_later > never == 0
    layer = all_layers / LAYERS
    assert two_layers < three_layers <= two_layers + 1.2 * layer
    assert three_layers < 0.7 * all_layers


def test_the_host_never_stops_where_copies_keep_up() -> None:
    assert stops_in_forward("eager", 0)[0] == 0


@pytest.mark.parametrize("policy", ["lazy", "eager", "random"])
def test_copies_that_the_device_orders_may_end_a_layer_later_within_a_placements_bytes(policy: str) -> None:
    peaks = []
    for late in (0, 1, ENOUGH):
        model = stack(layers=LAYERS)
        made = checked_on_host(model, policy)
        made.engine.place(dict.fromkeys(range(LAYERS), Placement(host=1.0, late_nbytes=late)))
        assert_equal(train(model, lambda step, model=model: model(ids(step)), made.manager), plain())
        assert made.backend.races == []
        peaks.append(made.engine.stats.peak_device_bytes)
        made.manager.close()
        assert made.engine.stats.device_bytes == 0
    layer = peaks[0] / 2
    assert peaks[0] == peaks[1] < peaks[2] <= 3.2 * layer, "two layers, and the one before them whole"


@pytest.mark.parametrize("policy", ["lazy", "eager", "random"])
def test_without_overlap_the_device_holds_one_layer_in_either_direction(policy: str) -> None:
    peaks = {}
    for overlap in (True, False):
        model = stack(layers=LAYERS)
        made = checked_on_host(model, policy)
        made.engine.place(dict.fromkeys(range(LAYERS), Placement(host=1.0)), overlap=overlap)
        assert_equal(train(model, lambda step, model=model: model(ids(step)), made.manager), plain())
        assert made.backend.races == []
        peaks[overlap] = made.engine.stats.peak_device_bytes
        made.manager.close()
        assert made.engine.stats.device_bytes == 0
    assert peaks[False] <= 0.55 * peaks[True]


def test_no_copy_ends_later_where_a_recompute_that_is_tried_needs_the_room() -> None:
    model = stack(layers=LAYERS)
    made = checked_on_host(model, "lazy")
    made.engine.place(dict.fromkeys(range(LAYERS), Placement(host=1.0, late_nbytes=ENOUGH)))
    held = []

    def release(group: Group, *, between: bool) -> None:
        with made.engine.trial(group, has_room=False):
            held.append(made.engine.stats.device_bytes)
        end_layer(group, between=between)

    end_layer, made.engine.end_layer = made.engine.end_layer, release  # type: ignore[method-assign]
    with made.manager:
        loss = model(ids())
    assert max(held[1:]) < 1.2 * held[0], "the running layer's alone"
    loss.backward()
    made.manager.close()


class HostApart(CpuBackend):
    """A host that is not the compute stream, as beside a GPU: what its threads do it need not wait for."""

    def would_block(self, event: Event) -> bool:
        return not event.query()


def behind_a_slow_disk(directory: Path, faults: Faults, late: int) -> Manager:
    model = stack(layers=LAYERS)
    store = DiskStore([directory], 1 << 22, open_file=faults.open)
    engine = Engine(HostApart(), [DiskTier(store, 1 << 22)], min_bytes=4096)
    engine.place({}, late_bytes=late)
    manager = Manager(model, find_layers(model), engine)
    manager.model = model  # type: ignore[attr-defined]
    return manager


@pytest.mark.parametrize("late", [0, ENOUGH])
def test_a_disk_that_is_behind_is_named_as_the_cause(tmp_path: Path, late: int) -> None:
    delay_s = 0.05
    faults = Faults().fail("write", 1, delay=delay_s, sticky=True)
    manager = behind_a_slow_disk(tmp_path, faults, late)
    model: Stack = manager.model  # type: ignore[attr-defined]
    with manager:
        loss = model(ids())
    assert (manager.stats.stalls_ns[StallCause.DISK_QUEUE] > 0) == (late == 0)
    assert manager.stats.stalls_ns[StallCause.DRAIN] < delay_s * 1e9, "a busy machine's pauses, and no write"
    loss.backward()
    manager.close()


@pytest.mark.filterwarnings("ignore:.*nothing was lost.*:RuntimeWarning")  # of other writes, which fail as it ends
def test_a_late_write_that_fails_is_raised_when_it_is_known(tmp_path: Path) -> None:
    faults = Faults().fail("write", 1, errno=5, sticky=True)
    manager = behind_a_slow_disk(tmp_path, faults, ENOUGH)
    model: Stack = manager.model  # type: ignore[attr-defined]

    def steps() -> None:
        for _ in range(50):
            with manager:
                loss = model(ids())
            loss.backward()

    with pytest.raises(StoreWriteError, match="EIO"):
        steps()
    manager.close()
