"""What a step holds of a layer is what its cut says, to the byte, and what a replay holds is what its plan says."""

from __future__ import annotations

import contextlib
import gc
from typing import TYPE_CHECKING, Any

import pytest
import torch
from slow_tests import first
from small_models import gradients
from twelve_kinds import KINDS

import memo
from memo.swap import Level
from memo.swap.recompute.tape.plan import Plan

if TYPE_CHECKING:
    from pathlib import Path

pytest.importorskip("transformers")
LEVELS = [Level.SAVE_INPUT, Level.SAVE_ATTENTION, Level.SAVE_MATMULS]


def steps(model: torch.nn.Module, forward: Any, manager: Any, count: int = 3) -> list[list[torch.Tensor | None]]:
    done = []
    for step in range(count):
        with manager:
            loss = forward(model, step)
        loss.backward()
        done.append([loss.detach(), *gradients(model)])
        model.zero_grad()
    return done


@pytest.mark.covering(1)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("level", LEVELS, ids=lambda level: level.name)
@pytest.mark.parametrize("kind", KINDS)
def test_bytes_that_move_are_those_of_the_cut(kind: str, level: Level, tmp_path: Path) -> None:
    """Of all layers but the last, whose backward comes next."""
    make, forward = KINDS[kind]
    torch.manual_seed(0)
    model = make().train()
    torch.manual_seed(0)
    reference = make().train()
    manager = memo.offload(model, alpha=level, disk=tmp_path, min_bytes=1)
    got = steps(model, forward, manager)
    for ours, theirs in zip(got, steps(reference, forward, contextlib.nullcontext()), strict=True):
        assert all(a is b or torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))  # type: ignore[arg-type]
    before = manager.stats.bytes_disk
    with manager:
        loss = forward(model, 2)
    tapes = manager._recompute_policy
    plans = [tapes._plans.last(layer.name)[2] for layer in manager.layers]
    kept = [plan.kept_bits for plan in plans if isinstance(plan, Plan)]
    assert len(kept) == len(manager.layers)
    assert 8 * (manager.stats.bytes_disk - before) == sum(kept[:-1])
    del loss
    gc.collect()
    assert manager.stats.live_entries == 0
    manager.close()
    assert manager.stats.device_bytes == 0


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", first(KINDS, 3))
def test_levels_are_ordered_and_the_least_is_small(kind: str, tmp_path: Path) -> None:
    make, forward = KINDS[kind]
    moved = []
    for level in (*LEVELS, Level.SAVE_ALL):
        torch.manual_seed(0)
        model = make().train()
        manager = memo.offload(model, alpha=level, disk=tmp_path, min_bytes=1)
        steps(model, forward, manager, 2)
        before = manager.stats.bytes_disk
        steps(model, forward, manager, 1)
        moved.append(manager.stats.bytes_disk - before)
        manager.close()
    assert moved == sorted(moved)
    assert moved[1] < 0.35 * moved[-1], [f"{some / moved[-1]:.2f}" for some in moved]
