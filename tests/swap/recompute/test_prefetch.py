"""What a replay reads is on its way a layer ahead: a replay waits for the link, and never asks it for anything."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from small_models import assert_equal, ids, stack, train

import memo
from memo.swap import Level
from memo.swap.engine.handles import Handle
from memo.swap.engine.saved_storage import AWAY, BACK, RETURNING

if TYPE_CHECKING:
    from pathlib import Path

    from memo.swap.engine.saved_storage import SavedStorage

LAYERS = 5


def kept_by_replay(saved: SavedStorage) -> list[SavedStorage]:
    """Storages in a tier that the replay of a saved storage reads."""
    if saved.replay is None:
        return []
    packed = (kept.packed for kept in saved.replay._kept)  # type: ignore[attr-defined]
    there = [handle.hold.saved for handle in packed if type(handle) is Handle]
    return [kept for kept in there if kept.source is None and kept.extent is not None]


@pytest.mark.parametrize("alpha", [0.0, 0.5, (0.25, 0.5, 0.25), Level.SAVE_MATMULS, Level.SAVE_INPUT], ids=str)
def test_what_a_replay_reads_is_reloaded_while_the_layer_before_it_computes(alpha: Any, tmp_path: Path) -> None:
    model, reference = stack(layers=LAYERS), stack(layers=LAYERS)
    how = {"levels": dict.fromkeys(range(LAYERS), alpha)} if isinstance(alpha, Level) else {"alpha": alpha}
    manager = memo.offload(model, disk=tmp_path, min_bytes=64, **how)
    reload = manager._engine._reload
    reach, fetch, recompute = reload.reach, reload._fetch, reload.recompute
    reached: list[int] = []
    seen = {"ahead": 0, "in a replay": 0}
    replaying: list[Any] = []

    def watch_reach(group: Any) -> None:
        if group.index < LAYERS - 1 and group.index not in reached:  # the last one is reached first
            for kept in {kept for saved in group.living() for kept in kept_by_replay(saved)}:
                assert kept.group is group
                assert kept.state in (RETURNING, BACK), f"{kept.nbytes} bytes of {kept.module} wait for its backward"
                seen["ahead"] += 1
        reached.append(group.index)
        reach(group)

    def watch_recompute(saved: SavedStorage) -> None:
        replay: Any = saved.replay
        with_reach = replay.recompute

        def run(take: Any) -> None:
            replaying.append(replay)
            try:
                with_reach(take)
            finally:
                replaying.pop()

        replay.recompute = run
        try:
            recompute(saved)
        finally:
            del replay.recompute

    def watch_fetch(wanted: Any) -> None:
        for saved in wanted:
            if replaying and saved.state is AWAY and saved.extent is not None:
                seen["in a replay"] += 1
        fetch(wanted)

    reload.reach, reload._fetch, reload.recompute = watch_reach, watch_fetch, watch_recompute  # type: ignore[method-assign]

    def forward(step: int) -> Any:
        reached.clear()
        return model(ids(step, batch=2, seq=48))

    got = train(model, forward, manager, steps=3)
    assert_equal(got, train(reference, lambda step: reference(ids(step, batch=2, seq=48)), steps=3))
    assert manager.stats.bytes_recomputed > 0
    assert seen["ahead"] >= LAYERS - 1
    assert seen["in a replay"] == 0
    manager.close()
