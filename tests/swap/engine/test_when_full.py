"""Bytes that no tier has room for, in a run that plans itself: they stay or are recomputed, counted, and never an error."""

from __future__ import annotations

import random
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from race_checker import CheckingBackend
from small_models import assert_equal, checked, ids, lives, stack, train
from torch import nn

from memo.errors import HostBudgetExceeded
from memo.events import TierName
from memo.kernels import Codec
from memo.swap import Engine, Placement, WhenFull
from memo.swap.recompute.tape.recorder import Recorder
from memo.swap.tiers import HostTier
from memo.units import format_bytes

LAYER = 16 * 2 * 48 * 32 * 4 + (1 << 12)  # what one small block saves of two sequences
ENTRY = 2 * 48 * 32 * 4
LAYERS = 6


def seeded(model: nn.Module) -> Callable[[int], torch.Tensor]:
    def forward(step: int) -> torch.Tensor:
        torch.manual_seed(step)
        random.seed(step)
        loss: torch.Tensor = model(ids(step))
        return loss

    return forward


@contextmanager
def silent() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        yield


class Unplanned:
    """A plan source before its first plan."""

    plan = None

    def before_forward(self, *, may_end: bool = True) -> None: ...

    def before_layer(self, args: Any, kwargs: Any) -> None: ...

    def after_forward(self) -> None: ...

    def outcome(self) -> None: ...


def full(budget: int, alpha: Any = 1.0, policy: str = "random") -> Any:
    made = checked(stack(layers=LAYERS), policy, budget=budget, alpha=alpha, when_full=WhenFull.STAY)
    made.manager.plan_with(Unplanned())
    return made


def trained(made: Any, steps: int = 3) -> Any:
    """Trains within the manager, and compares with the same steps without it."""
    model = made.manager._model
    reference = stack(layers=LAYERS)
    assert_equal(
        train(model, seeded(model), made.manager, steps=steps), train(reference, seeded(reference), steps=steps)
    )
    assert made.backend.races == []
    assert made.engine.stats.live_entries == made.engine.stats.device_bytes == 0
    assert all(tier.used == 0 and tier.peak <= tier.budget for tier in made.engine.tiers)
    return made.manager.report()


@pytest.mark.parametrize("alpha", [1.0, 0.5])
@pytest.mark.parametrize("policy", ["lazy", "eager", "random"])
def test_what_no_tier_has_room_for_stays_where_the_device_has(policy: str, alpha: float) -> None:
    made = full(int(0.9 * LAYER), alpha, policy)
    made.engine.place({}, rest_bytes=2 * LAYERS * LAYER)
    before = made.engine.stats.bytes_recomputed
    with silent():
        report = trained(made)
    assert (made.engine.stats.bytes_recomputed > before) == (alpha < 1), "by its levels alone"
    assert report.recomputed_for_room is None
    stayed = report.stayed
    assert stayed.nbytes == made.engine.take_lacking()[TierName.HOST] == made.engine.stats.bytes_kept
    assert made.engine.take_lacking() == {}
    assert report.kept_bytes == 0, "none of it by plan"
    made.manager.close()


def test_the_report_says_in_one_line_what_stayed_and_in_which_step_most() -> None:
    made = full(int(1.5 * LAYER))  # alpha 1
    made.engine.place({}, rest_bytes=2 * LAYERS * LAYER)
    manager, model = made.manager, made.manager._model
    for step, times in enumerate((1, 2, 1), 1):
        manager.step = step
        with manager:
            loss = model(ids(step, batch=2 * times))
        if times == 2:
            staying = {saved.module for saved in lives(manager) if saved.extent is None} - {f"layers.{LAYERS - 1}"}
        loss.backward()
        manager.step_done()
    stayed = manager.report().stayed
    assert (stayed.steps, stayed.worst.step, stayed.layers) == (3, 2, len(staying))
    line = next(line for line in str(manager.report()).splitlines() if line.startswith("stayed"))
    assert line == (
        f"stayed on the device for lack of room: {format_bytes(stayed.nbytes)} of {len(staying)} layers in 3 steps, since "
        f"the host tier was full; most in step 2, {format_bytes(stayed.worst.nbytes)}"
    )
    manager.close()


@pytest.mark.parametrize("alpha", [0.5, (0.25, 0.5, 0.25), (0.0, 1.0, 0.0)])
def test_without_room_anywhere_recorded_layers_are_recomputed_in_the_same_call(alpha: Any) -> None:
    made = full(int(1.0 * LAYER), alpha)
    with silent():
        report = trained(made, steps=1)
    recomputed = report.recomputed_for_room
    assert 0 < recomputed.layers < LAYERS
    assert report.stayed is None, "their inputs have room"
    assert made.engine.take_lacking() == {TierName.HOST: recomputed.nbytes}
    assert re.search(r"recomputed whole, attention included: .*: no tier has room for it", str(report))
    assert re.search(
        rf"recomputed whole for lack of room: .* of {recomputed.layers} layers in 1 steps, since the host tier was full; "
        r"most in step \d+, ",
        str(report),
    )
    made.manager.close()


def test_layers_that_move_all_are_recorded_once_there_may_be_no_room() -> None:
    """By what the plan says in the first step, later by what their last full call moved."""
    made = full(int(2.5 * LAYER))
    made.engine.place(dict.fromkeys(range(LAYERS), Placement(host=1.0, nbytes=LAYER)))
    with silent():
        report = trained(made)
    assert report.stayed is None
    assert (report.recomputed_for_room.layers, report.recomputed_for_room.steps) == (3, 3)
    made.manager.close()


def test_layers_are_recorded_only_where_room_may_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    recorded: list[Any] = []
    enter = Recorder.__enter__
    monkeypatch.setattr(Recorder, "__enter__", lambda self: recorded.append(self) or enter(self))
    placements = dict.fromkeys(range(LAYERS), Placement(host=1.0, nbytes=LAYER))
    for budget, rest, most in ((8, 0, 0), (2.5, 8, 0), (2.5, 0, 3 * 4)):
        made = full(int(budget * LAYER))
        made.engine.place(placements, rest_bytes=int(rest * LAYER))
        trained(made)
        assert len(recorded) <= most
        assert bool(recorded) == bool(most)
        made.manager.close()


def test_what_cannot_be_helped_stays_with_one_warning() -> None:
    """Not even the inputs have room."""
    made = full(2 * ENTRY, 0.5)
    with pytest.warns(RuntimeWarning) as told:
        report = trained(made)
    assert len([one for one in told if "it stays on the device" in str(one.message)]) == 1
    assert report.recomputed_for_room.layers == 5
    assert report.stayed.layers == 3, "two inputs of five have room; the last layer's stays anyway"
    made.manager.close()


def test_what_stays_for_lack_of_room_is_no_part_of_what_later_layers_keep() -> None:
    """A layer that the plan keeps is not sent to a full tier since an earlier one's bytes stayed."""
    made = full(LAYER // 2)
    placements = {0: Placement(host=1.0), **dict.fromkeys(range(1, LAYERS), Placement(kept=1.0))}
    made.engine.place(placements, rest_bytes=2 * LAYERS * LAYER)
    report = trained(made, steps=2)
    assert report.stayed.layers == 1
    made.manager.close()


@pytest.mark.parametrize("codec", [None, Codec.FP8])
@pytest.mark.parametrize("alpha", [1.0, 0.5, 0.0])
def test_nothing_is_recomputed_or_stays_in_just_the_room_that_a_step_needs(alpha: float, codec: Codec | None) -> None:
    """Codes need less room than their values."""

    def run(budget: int) -> tuple[int, Any]:
        made = full(budget, alpha)
        made.engine.codec = codec
        made.engine.place(dict.fromkeys(range(LAYERS), Placement(host=1.0)))
        train(made.manager._model, seeded(made.manager._model), made.manager, steps=2)
        report, (host,) = made.manager.report(), made.engine.tiers
        made.manager.close()
        return host._space.peak, report

    needed, _ = run(1 << 24)
    with silent():
        peak, report = run(needed)
    assert peak == needed
    assert report.stayed is report.recomputed_for_room is None


def test_a_value_without_a_code_stays_where_its_exact_bytes_have_no_room() -> None:
    backend = CheckingBackend("lazy")
    engine = Engine(backend, [HostTier(backend, 3 << 12)], min_bytes=512, codec=Codec.INT8, when_full=WhenFull.STAY)
    engine.place({}, rest_bytes=1 << 20)
    want = torch.linspace(-1, 1, 4096)
    want[7] = float("inf")
    engine.begin_forwards()
    group = engine.begin_layer(0, "first", (want,), {}, last=False)
    handle = engine.pack(want.clone())
    engine.end_layer(group, between=True)
    engine.end_layer(engine.begin_layer(1, "next", (want,), {}, last=False), between=True)
    engine.end_forwards()
    assert engine.stats.coded_exact == 1
    assert engine.take_lacking() == {TierName.HOST: 4 * 4096}
    assert torch.equal(engine.unpack(handle), want)
    del handle, group
    engine.begin_forwards()
    assert engine.stats.device_bytes == engine.tiers[0].used == 0
    engine.close()


@pytest.mark.parametrize("policy", ["lazy", "eager", "random"])
def test_the_last_layer_of_a_run_that_plans_itself_drops_what_it_recomputes_at_its_end(policy: Any) -> None:
    """Whoever chose a fixed setting has room for it, and its last layer is not recomputed."""
    for when_full, drops in ((WhenFull.STAY, True), (WhenFull.SPILL, False)):
        model, reference = stack(layers=LAYERS), stack(layers=LAYERS)
        made = checked(model, policy, alpha=0.0, when_full=when_full)
        for step in range(3):
            with made.manager:
                loss = model(ids(step))
            last = [saved for saved in lives(made.manager) if saved.module == f"layers.{LAYERS - 1}"]
            recomputed = [saved for saved in last if saved.replay is not None]
            assert sum(saved.nbytes for saved in recomputed) > LAYER / 2
            assert {saved.source is None for saved in recomputed} == {drops}
            before = made.engine.stats.bytes_recomputed
            loss.backward()
            wanted = reference(ids(step))
            wanted.backward()
            assert torch.equal(loss, wanted)
            assert all(
                torch.equal(ours.grad, theirs.grad)  # type: ignore[arg-type]
                for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True)
            )
            layers = LAYERS if drops else LAYERS - 1
            assert made.engine.stats.bytes_recomputed - before == layers * sum(saved.nbytes for saved in recomputed)
        assert made.backend.races == []
        del last, recomputed, loss
        made.manager.close()


def test_a_full_tier_is_an_error_with_any_other_response() -> None:
    for when_full in (WhenFull.RAISE, WhenFull.SPILL):
        made = checked(stack(layers=LAYERS), budget=int(2.5 * LAYER), when_full=when_full)
        made.engine.place({}, rest_bytes=1 << 40)
        with pytest.raises(HostBudgetExceeded), made.manager:
            made.manager._model(ids())
