"""Swap and recompute over the checking backend: no schedule of the copies races with the recompute or changes a gradient."""

from __future__ import annotations

import gc
import warnings
from typing import Any

import pytest
import torch
from small_models import SEQ, Block, assert_equal, checked, gradients, ids, stack, train

from memo.swap import Level

ALPHAS = [0.0, 0.25, 0.5, 0.75, (0.25, 0.5, 0.25)]


@pytest.mark.covering(2)
@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("policy", ["lazy", "eager", "random"])
def test_gradients_are_equal_and_nothing_races(policy: str, alpha: Any, batch: int, tier: str) -> None:
    model = stack(layers=4)
    made = checked(model, policy, tier=tier, alpha=alpha, seed=7)
    got = train(model, lambda step: model(ids(step, batch)), made.manager)
    reference = stack(layers=4)
    assert_equal(got, train(reference, lambda step: reference(ids(step, batch))))
    gc.collect()
    assert made.manager.stats.live_entries == 0
    assert made.manager.stats.bytes_recomputed > 0
    assert not made.manager.report().recompute.refused  # type: ignore[union-attr]
    made.manager.close()
    assert made.manager.stats.device_bytes == 0
    assert all(tier.used == 0 for tier in made.engine.tiers)
    assert made.backend.races == []


def test_a_second_backward_recomputes_nothing_and_is_equal() -> None:
    model = stack()
    made = checked(model, alpha=0.25)
    with made.manager:
        loss = model(ids())
    loss.backward(retain_graph=True)
    first, recomputed = gradients(model), made.manager.stats.bytes_recomputed
    assert recomputed > 0
    model.zero_grad()
    loss.backward()
    assert made.manager.stats.bytes_recomputed == recomputed
    assert all(torch.equal(a, b) for a, b in zip(first, gradients(model), strict=True))  # type: ignore[arg-type]
    reference = stack()
    reference(ids()).backward()
    assert all(torch.equal(a, b) for a, b in zip(first, gradients(reference), strict=True))  # type: ignore[arg-type]


@pytest.mark.parametrize("alpha", [0.25, (0.25, 0.5, 0.25), (0, 1, 0), Level.SAVE_INPUT], ids=str)
def test_a_graph_frees_everything_when_it_dies(alpha: Any) -> None:
    """At once, by reference counts alone, whether it was backwarded or not: nothing that is saved holds itself."""
    model = stack()
    made = checked(model, alpha=alpha)
    train(model, lambda step: model(ids(step)), made.manager)  # what a trial leaves is not a graph's
    gc.collect()
    gc.disable()
    try:
        for step in range(4):
            with made.manager:
                loss = model(ids(step))
            if step % 2:
                loss.backward()
            del loss
            assert made.manager.stats.live_entries == 0
    finally:
        gc.enable()
    made.manager.close()
    assert all(tier.used == 0 for tier in made.engine.tiers)
    assert made.backend.races == []


def test_microbatches_whose_backwards_come_first_in_first_out() -> None:
    def steps(manager: Any, model: Any) -> list[Any]:
        losses = []
        for step in range(3):
            if manager is None:
                losses.append(model(ids(step)))
            else:
                with manager:
                    losses.append(model(ids(step)))
        for loss in losses:
            loss.backward()
        return gradients(model)

    model = stack(layers=4)
    made = checked(model, "random", alpha=0.25)
    got = steps(made.manager, model)
    assert all(torch.equal(a, b) for a, b in zip(got, steps(None, stack(layers=4)), strict=True))
    made.manager.close()
    assert made.backend.races == []


class Forgets(Block):
    """Its input is saved by an operation whose result is dropped at once, and then by others."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x.max()
        return super().forward(x)


@pytest.mark.parametrize("alpha", [0.25, 1.0])
def test_a_storage_whose_handles_died_while_it_was_copied_is_saved_anew(alpha: float) -> None:
    model = stack(make=lambda: Forgets(32, 2))
    made = checked(model, alpha=alpha)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        got = train(model, lambda step: model(ids(step)), made.manager)
    reference = stack(make=lambda: Forgets(32, 2))
    assert_equal(got, train(reference, lambda step: reference(ids(step))))
    made.manager.close()
    assert made.backend.races == []


def test_a_copy_that_outlives_its_graph_keeps_no_other_storage_alive() -> None:
    """The copies run as late as they may; what would have been computed again needs the layer's input, and goes at once."""
    model = stack()
    made = checked(model, "lazy", alpha=0.25)
    with made.manager:
        out = model.layers[1](model.layers[0](torch.randn(2, SEQ, 32)))
    assert made.manager.stats.live_entries > 0
    del out
    gc.collect()
    assert made.engine._release.has_limbo
    assert made.manager.stats.live_entries == 0
    made.manager.close()
