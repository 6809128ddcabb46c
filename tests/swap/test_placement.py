"""Bytes of a layer by plan: within one storage of the fractions, kept ones untouched, gradients equal."""

from __future__ import annotations

import collections
import gc
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import given, strategies as st
from race_checker import CheckingBackend, CheckingDisk
from small_models import Stack, assert_equal, ids, stack, train

from memo.errors import HostBudgetExceeded, ModifiedAfterSave, UsageError
from memo.events import TierName, UseKind
from memo.manager import Manager
from memo.swap import Engine, Placement, Quota, WhenFull, find_layers
from memo.swap.engine.saved_storage import LIVE, SavedStorage
from memo.swap.tiers import DiskTier, HostTier

if TYPE_CHECKING:
    from collections.abc import Mapping

ROOM = 1 << 24
MIXED = {
    0: Placement(kept=1.0),
    1: Placement(kept=0.25, host=0.5, disk=0.25),
    2: Placement(host=0.3, disk=0.7),
    3: Placement(disk=1.0),
}


def managed(
    model: Stack,
    placements: Mapping[int, Placement],
    *,
    policy: Any = "lazy",
    seed: int = 0,
    host: int = ROOM,
    when_full: WhenFull = WhenFull.SPILL,
) -> Manager:
    backend = CheckingBackend(policy, seed=seed)
    tiers = [HostTier(backend, host, segment_bytes=1 << 20), DiskTier(CheckingDisk(backend, ROOM), ROOM)]
    engine = Engine(backend, tiers, min_bytes=512, when_full=when_full)
    engine.place(placements or {})
    return Manager(model, find_layers(model), engine)


def living(manager: Manager) -> dict[int, list[SavedStorage]]:
    """What each layer has saved."""
    return {group.key[0]: group.living() for group in manager._engine._layer_calls}


def tier_of(saved: SavedStorage) -> TierName:
    return TierName.DEVICE if saved.extent is None else saved.extent.tier.name


def plain(model: Stack) -> Any:
    return train(model, lambda step: model(ids(step)))


@pytest.mark.parametrize("policy", ["lazy", "eager", "random"])
def test_gradients_are_equal_under_every_schedule_with_layers_placed_apart(policy: str) -> None:
    model = stack(layers=5)
    manager = managed(model, MIXED, policy=policy)
    assert_equal(train(model, lambda step: model(ids(step)), manager), plain(stack(layers=5)))
    assert manager._engine.backend.races == []  # type: ignore[attr-defined]
    manager.close()
    assert manager.stats.live_entries == 0
    assert manager.stats.device_bytes == 0
    assert all(tier.used == 0 for tier in manager._engine.tiers)
    assert min(manager.stats.bytes_kept, manager.stats.bytes_host, manager.stats.bytes_disk) > 0


def test_each_layers_bytes_are_within_one_storage_of_its_fractions() -> None:
    model = stack(layers=5)
    manager = managed(model, MIXED)
    for step in range(3):
        with manager:
            loss = model(ids(step))
        if step:  # the first call cannot know how much is still to come
            for layer, placement in MIXED.items():
                sizes: collections.Counter[TierName] = collections.Counter()
                for saved in living(manager)[layer]:
                    sizes[tier_of(saved)] += saved.nbytes
                largest = max(saved.nbytes for saved in living(manager)[layer])
                for tier, fraction in placement.fractions.items():
                    assert abs(sizes[tier] - fraction * sizes.total()) <= largest, (layer, tier)
        loss.backward()
    del saved  # a storage that somebody holds over a step counts once
    stats = manager.stats
    assert (stats.live_entries, stats.saved_bytes, stats.device_bytes) == (0, 0, 0)
    manager.close()


def test_a_kept_layer_is_never_copied_and_counted_as_kept() -> None:
    model = stack(layers=3)
    manager = managed(model, dict.fromkeys(range(3), Placement(kept=1.0)))
    with manager:
        loss = model(ids())
    kept = [saved for group in living(manager).values() for saved in group]
    # The last layer's copies wait for another layer to follow; none does, so nobody asked where they should go.
    placed = [saved for layer in (0, 1) for saved in living(manager)[layer]]
    assert {saved.state for saved in kept} == {LIVE}
    assert {saved.out for saved in kept} == {None}
    assert manager.stats.bytes_kept == sum(saved.nbytes for saved in placed) > 0
    del kept, placed
    loss.backward()
    stats = manager.stats
    assert (stats.bytes_host, stats.bytes_disk, stats.bytes_reloaded) == (0, 0, 0)
    assert stats.uses[UseKind.LIVE] == sum(stats.uses.values()) > 0
    assert "kept on the device by plan" in str(manager.report())
    manager.close()


def test_a_kept_tensor_changed_in_place_is_an_error() -> None:
    class Squares(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x + 1.0
            z = y * y
            y.add_(1.0)
            return z

    model = stack(layers=2, make=Squares)
    manager = managed(model, {0: Placement(kept=1.0)})
    with manager:
        loss = model(ids())
    assert manager.stats.bytes_kept > 0
    with pytest.raises(ModifiedAfterSave):
        loss.backward()
    manager.close()


def test_what_the_chosen_tier_has_no_room_for_goes_to_another_and_is_counted() -> None:
    model = stack(layers=4)
    manager = managed(model, dict.fromkeys(range(4), Placement(host=1.0)), host=100_000)
    assert_equal(train(model, lambda step: model(ids(step)), manager), plain(stack(layers=4)))
    assert manager.stats.spilled > 0
    assert manager.stats.bytes_disk > 0
    assert manager._engine.tiers[0].peak <= 100_000
    manager.close()


def test_without_spilling_a_full_tier_is_an_error_although_another_has_room() -> None:
    model = stack(layers=4)
    manager = managed(model, dict.fromkeys(range(4), Placement(host=1.0)), host=50_000, when_full=WhenFull.RAISE)
    with pytest.raises(HostBudgetExceeded, match="no room"), manager:
        model(ids())
    gc.collect()
    manager.close()


def test_placements_change_from_one_step_to_the_next() -> None:
    model = stack(layers=3)
    manager = managed(model, {})
    engine, stats = manager._engine, manager.stats
    moved = []
    for placement in (None, Placement(disk=1.0), Placement(kept=1.0), None):
        before = stats.bytes_host, stats.bytes_disk, stats.bytes_kept
        engine.place({} if placement is None else dict.fromkeys(range(3), placement))
        train(model, lambda step: model(ids(step)), manager, steps=1)
        after = stats.bytes_host, stats.bytes_disk, stats.bytes_kept
        moved.append(tuple(now > then for now, then in zip(after, before, strict=True)))
    assert moved == [(True, False, False), (False, True, False), (False, False, True), (True, False, False)]
    manager.close()


def test_a_placement_into_a_tier_that_is_off_is_refused() -> None:
    backend = CheckingBackend()
    engine = Engine(backend, [HostTier(backend, ROOM)], min_bytes=512)
    with pytest.raises(UsageError, match="layer 7 sends 25% of its bytes to disk"):
        engine.place({7: Placement(kept=0.75, disk=0.25)})


@pytest.mark.parametrize(
    "fractions", [{"kept": 0.5}, {"kept": 1.5, "host": -0.5}, {"host": float("nan")}, {"host": 0.7, "disk": 0.7}]
)
def test_a_placement_that_is_no_division_is_refused(fractions: dict[str, float]) -> None:
    with pytest.raises(UsageError, match="placement"):
        Placement(**fractions)


def test_a_quota_serves_who_misses_most_and_equals_in_order() -> None:
    quota = Quota(Placement(kept=0.5, host=0.25, disk=0.25), expected_nbytes=100)
    assert [quota.choose(nbytes) for nbytes in (30, 10, 25, 15, 20)] == [
        TierName.DEVICE,
        TierName.HOST,
        TierName.DISK,
        TierName.DEVICE,
        TierName.HOST,
    ]


def test_a_storage_that_is_too_large_for_what_the_device_may_keep_moves() -> None:
    quota = Quota(Placement(kept=0.5, host=0.5), expected_nbytes=100)
    assert [quota.choose(nbytes) for nbytes in (60, 30, 10)] == [TierName.HOST, TierName.DEVICE, TierName.DEVICE]
    assert quota.unkept_nbytes == 10


weights = st.tuples(*[st.integers(0, 10)] * 3).filter(any)
layers = st.lists(st.tuples(weights, st.lists(st.integers(1, 1000), min_size=1, max_size=12)), min_size=1, max_size=10)


def placement_of(shares: tuple[int, ...], nbytes: int = 0) -> Placement:
    kept, host, disk = (share / sum(shares) for share in shares)
    return Placement(kept=kept, host=host, disk=disk, nbytes=nbytes)


@given(layers)
def test_over_a_pass_no_tier_gets_one_storage_more_than_planned_and_the_device_nothing_more(
    drawn: list[tuple[tuple[int, ...], list[int]]],
) -> None:
    manager = managed(stack(), {})
    tier_choice = manager._engine._tier_choice
    placements = {number: placement_of(shares, sum(sizes)) for number, (shares, sizes) in enumerate(drawn)}
    tier_choice.place(placements)
    got: collections.Counter[TierName] = collections.Counter()
    planned: collections.Counter[TierName] = collections.Counter()
    largest = 0
    for number, (_, sizes) in enumerate(drawn):
        quota = tier_choice.quota(number)
        assert quota is not None
        largest = max(largest, *sizes)
        for nbytes in sizes:
            got[quota.choose(nbytes)] += nbytes
        for tier, fraction in placements[number].fractions.items():
            planned[tier] += fraction * sum(sizes)  # type: ignore[assignment]
        assert got[TierName.DEVICE] <= planned[TierName.DEVICE] + 0.1
        for tiers in ([TierName.HOST], [TierName.DISK], [TierName.HOST, TierName.DISK]):
            assert sum(got[tier] - planned[tier] for tier in tiers) <= largest + 0.1
    manager.close()


def test_bytes_that_were_expected_and_not_saved_make_no_later_layer_move_what_it_keeps() -> None:
    manager = managed(stack(), {})
    tier_choice = manager._engine._tier_choice
    tier_choice.place({0: Placement(host=1.0, nbytes=1000), 1: Placement(kept=1.0, nbytes=300)})
    first = tier_choice.quota(0)
    assert first is not None
    assert first.choose(100) is TierName.HOST
    second = tier_choice.quota(1)
    assert second is not None
    assert [second.choose(100) for _ in range(3)] == [TierName.DEVICE] * 3
    manager.close()


def test_what_rounding_moves_too_much_stays_where_no_tier_has_room_for_it() -> None:
    """A host tier with room for no more than a quarter: fractions that add up are no reason to fail."""
    model = stack(layers=4)
    manager = managed(model, dict.fromkeys(range(4), Placement(kept=0.75, host=0.25)))
    train(model, lambda step: model(ids(step)), manager, steps=2)
    planned = sum(manager._engine._tier_choice._saved_nbytes.values()) // 4
    manager.close()
    model = stack(layers=4)
    backend = CheckingBackend("lazy")
    tiers = [HostTier(backend, planned + 4096, segment_bytes=1 << 12)]
    engine = Engine(backend, tiers, min_bytes=512)
    engine.place(dict.fromkeys(range(4), Placement(kept=0.75, host=0.25)))
    manager = Manager(model, find_layers(model), engine)
    assert_equal(train(model, lambda step: model(ids(step)), manager), plain(stack(layers=4)))
    assert tiers[0].peak <= planned + 4096
    manager.close()


@given(weights, st.lists(st.integers(1, 1000), min_size=1, max_size=40))
def test_a_quota_that_knows_the_total_ends_within_the_largest_storage(
    shares: tuple[int, ...], sizes: list[int]
) -> None:
    fractions = [share / sum(shares) for share in shares]
    placement = Placement(kept=fractions[0], host=fractions[1], disk=fractions[2])
    quota = Quota(placement, expected_nbytes=sum(sizes))
    got: collections.Counter[TierName] = collections.Counter()
    for nbytes in sizes:
        got[quota.choose(nbytes)] += nbytes
    for tier, fraction in placement.fractions.items():
        assert abs(got[tier] - fraction * sum(sizes)) <= max(sizes) + 1e-3
        assert fraction or not got[tier]


@given(weights, st.lists(st.integers(1, 1000), min_size=30, max_size=60))
def test_a_quota_that_knows_nothing_keeps_the_proportion(shares: tuple[int, ...], sizes: list[int]) -> None:
    fractions = [share / sum(shares) for share in shares]
    placement = Placement(kept=fractions[0], host=fractions[1], disk=fractions[2])
    quota = Quota(placement)
    got: collections.Counter[TierName] = collections.Counter()
    for nbytes in sizes:
        got[quota.choose(nbytes)] += nbytes
    for tier, fraction in placement.fractions.items():
        assert abs(got[tier] - fraction * sum(sizes)) <= 2 * max(sizes)


def test_what_a_layer_owes_the_device_is_kept_by_one_that_keeps_nothing_itself() -> None:
    """Else the host would have no room for what rounding sent there, in a plan that fills its budget to the last byte."""
    between = Quota(
        Placement(host=1.0),
        expected_nbytes=1000,
        carried={TierName.DEVICE: 300.0, TierName.HOST: -200.0, TierName.DISK: -100.0},
    )
    assert [between.choose(600), between.choose(200)] == [TierName.HOST, TierName.DEVICE]
    assert between.unkept_nbytes == between.copy().unkept_nbytes == 100.0
    assert between.choose(200) is TierName.HOST
    assert between.carried == {TierName.DEVICE: 100.0, TierName.HOST: 0.0, TierName.DISK: -100.0}
    between.keeps_instead(TierName.HOST, 400)
    assert between.unkept_nbytes == 0.0


@pytest.mark.parametrize("begins", [False, True])
def test_what_a_pass_kept_too_little_is_not_kept_in_another(begins: bool) -> None:
    """Layers of two chunks are held for other times, also where one ran just after the other."""
    halves = Placement(kept=0.5, host=0.5, nbytes=1000)
    second = Placement(kept=0.5, host=0.5, nbytes=1000, begins=begins)
    manager = managed(stack(), {0: halves, 1: second})
    tier_choice = manager._engine._tier_choice
    first = tier_choice.quota(0)
    assert first is not None
    assert first.choose(1000) is TierName.HOST
    after = tier_choice.quota(1)
    assert after is not None
    assert first.unkept_nbytes == 500.0
    assert after.choose(900) is (TierName.HOST if begins else TierName.DEVICE)
    manager.close()
