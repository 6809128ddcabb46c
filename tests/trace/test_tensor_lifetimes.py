"""Lives and the bytes they hold, on traces small enough to add up by hand."""

from __future__ import annotations

import pytest

from memo.events import Event, Lane, Span, StateChange, StorageUse, TensorState, TierName, UseKind
from memo.trace import residency_changes
from memo.trace.tensor_lifetimes import layer_of, lifetimes_of

S = TensorState


def state(t: int, to: TensorState, *, id: int = 1, nbytes: int = 10, tier: TierName | None = None) -> StateChange:
    module = "layers.3.mlp" if to is S.LIVE else None
    return StateChange(t=t, step=0, id=id, to=to, nbytes=nbytes, tier=tier, module=module)


def held(events: list[Event]) -> list[tuple[int, str, int]]:
    """(t, tier, total) after each change."""
    totals = dict.fromkeys(TierName, 0)
    found = []
    for change in residency_changes(lifetimes_of(events)):
        totals[change.tier] += change.delta
        found.append((change.t, change.tier.value, totals[change.tier]))
    return found


def test_a_storage_holds_both_tiers_while_it_leaves_and_until_it_is_gone_again() -> None:
    events: list[Event] = [
        state(0, S.LIVE),
        state(1, S.LEAVING, tier=TierName.HOST),
        state(2, S.AWAY, tier=TierName.HOST),
        state(3, S.RETURNING, tier=TierName.HOST),
        state(4, S.BACK, tier=TierName.HOST),
        state(5, S.GONE, tier=TierName.HOST),
    ]
    assert held(events) == [
        (0, "device", 10),
        (1, "host", 10),
        (2, "device", 0),
        (3, "device", 10),
        (5, "device", 0),
        (5, "host", 0),
    ]


def test_a_storage_that_moves_on_to_disk_leaves_the_host() -> None:
    events: list[Event] = [
        state(0, S.LIVE),
        state(1, S.LEAVING, tier=TierName.HOST),
        state(2, S.AWAY, tier=TierName.HOST),
        state(3, S.AWAY, tier=TierName.DISK),
        state(4, S.GONE),
    ]
    assert (3, "host", 0) in held(events)
    assert (3, "disk", 10) in held(events)
    assert lifetimes_of(events)[0].tier is TierName.DISK


def test_a_cancelled_copy_gives_its_place_back() -> None:
    events: list[Event] = [state(0, S.LIVE), state(1, S.LEAVING, tier=TierName.HOST), state(2, S.LIVE)]
    assert held(events)[-1] == (2, "host", 0)
    assert len(lifetimes_of(events)) == 1


def test_an_id_seen_again_after_it_was_gone_is_a_new_life() -> None:
    events: list[Event] = [state(0, S.LIVE), state(1, S.GONE), state(2, S.LIVE), state(3, S.GONE)]
    assert [(life.start_ns, life.end_ns) for life in lifetimes_of(events)] == [(0, 1), (2, 3)]


def test_lives_are_whole_though_the_ring_dropped_their_first_events() -> None:
    events: list[Event] = [
        Span(t=5, d=3, step=0, lane=Lane.D2H, id=9, nbytes=64),
        StorageUse(t=20, step=0, id=9, how=UseKind.LIVE),
    ]
    (life,) = lifetimes_of(events)
    assert (life.module, life.nbytes, life.start_ns, life.end_ns, life.tier) == ("", 64, 5, 20, TierName.HOST)
    assert residency_changes([life]) == []


@pytest.mark.parametrize(
    ("module", "layer"),
    [
        ("layers.3.mlp.up", "layers.3"),
        ("model.layers.12", "model.layers.12"),
        ("3", "3"),
        ("blocks.1.experts.7", "blocks.1"),
        ("lm_head", "lm_head"),
        ("conv2d.weight", "conv2d.weight"),
        ("", ""),
    ],
)
def test_the_layer_of_a_module_ends_at_its_first_number(module: str, layer: str) -> None:
    assert layer_of(module) == layer
