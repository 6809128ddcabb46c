"""A plan in pieces of a measured profile, run: what its replays hold is what the plan says, and no bit is another."""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import pytest
import torch
from live_bytes import CountedDevice, LiveBytes
from small_models import Stack, assert_equal, ids, train
from throttled_backend import PacedBackend
from torch.utils._python_dispatch import _disable_current_modes

import memo
from memo.autoplan.actuator import settings_of
from memo.manager.manager import Manager
from memo.manager.plan_source import checked_plan
from memo.mip.activation.plan import ActivationPlan, ActivationProblem, Budgets
from memo.mip.inputs.hardware import PRESETS
from memo.mip.inputs.profile import Profile
from memo.record import Step
from memo.swap.engine.engine import Engine
from memo.swap.layers import find_layers
from memo.swap.recompute.policy import RecomputePolicy
from memo.swap.recompute.ranges.ranged_plan import Piece
from memo.swap.recompute.ranges.ranged_replay import RangedReplay
from memo.swap.recompute.tape.settings import Settings
from memo.swap.tiers.host_and_disk import HostTier

TOKENS, LAYERS = 2048, 4
"""Long enough for tiles of 256 tokens."""

LEAST_USED = 0.7
"""Part of a plan's peak that its step takes: what is computed again a plan counts whole before it is."""


class CountedBackend(PacedBackend):
    """Device memory is torch's own, which the device counts."""

    def empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)


def model_of() -> torch.nn.Module:
    torch.manual_seed(0)
    return Stack(layers=LAYERS, hidden=64)


def forward(model: torch.nn.Module, step: int) -> torch.Tensor:
    loss: torch.Tensor = model(ids(step, 1, seq=TOKENS))
    return loss


@pytest.fixture(scope="module")
def profile() -> Profile:
    def build() -> Step:
        model = model_of()
        return Step(model=model, loss=lambda: forward(model, 0))

    found = memo.profile(build, name="stack", batch=1, tokens=TOKENS, repeats=1)
    (known,) = found.classes
    # Without what the trials of the first step compare with.
    known = dataclasses.replace(known, forward_transient_bytes=known.backward_transient_bytes)
    return dataclasses.replace(found, classes=(known,))


def plan_within(profile: Profile, room: float) -> ActivationPlan:
    """A plan of which the device has room for two whole layers, and of what a replay of all tokens holds for a part."""
    (known,) = profile.classes
    held = max(point.held_bytes for point in known.points)
    static = sum(layer.static_bytes for layer in profile.layer_profiles())
    static += profile.embedding.static_bytes + profile.head.static_bytes + profile.embedding.saved_bytes
    device = static + 2 * known.full_bytes + known.backward_transient_bytes + int(room * held)
    host = LAYERS * (known.fixed_bytes + 4096 * known.storages) + known.largest_storage_bytes
    budgets = Budgets(device_bytes=device, host_bytes=host)
    return checked_plan(ActivationProblem(profile=profile, hardware=PRESETS["a800"], budgets=budgets))


class Held:
    """Most bytes that each replay in backward holds, by layer; what comes back for it is not counted."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.most: dict[str, int] = {}
        self.tokens: dict[str, int] = {}
        self._live: LiveBytes | None = None
        run_piece, run_plan, reload = RangedReplay._run_piece, RangedReplay._run, RangedReplay._bring

        def noted(replay: RangedReplay, piece: Piece, take: Any) -> None:
            self.tokens[replay.name] = max(self.tokens.get(replay.name, 0), piece.stop - piece.first)
            run_piece(replay, piece, take)

        def measured(replay: RangedReplay, plan: Any, bring: Any, give: Any) -> None:
            def hidden(*args: Any) -> None:
                with _disable_current_modes():
                    give(*args)

            with LiveBytes() as self._live:
                run_plan(replay, plan, bring, hidden)
            self.most[replay.name] = max(self.most.get(replay.name, 0), self._live.peak)
            self._live = None

        def reloaded(replay: RangedReplay, position: int) -> torch.Tensor:
            with _disable_current_modes():
                tensor = reload(replay, position)
            if self._live is not None:
                self._live._known.add(tensor.untyped_storage())
            return tensor

        monkeypatch.setattr(Settings, "in_force", lambda settings: contextlib.nullcontext())  # runs in the mode
        monkeypatch.setattr(RangedReplay, "_run_piece", noted)
        monkeypatch.setattr(RangedReplay, "_run", measured)
        monkeypatch.setattr(RangedReplay, "_bring", reloaded)


@pytest.mark.parametrize("room", [0.6, 0.2])
def test_what_replays_hold_is_what_the_plan_says(
    room: float, profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = plan_within(profile, room)
    (known,) = profile.classes
    cut = {f"layers.{number}": part for number, part in enumerate(plan.layers) if part.piece < 1}
    assert cut
    model, reference = model_of(), model_of()
    backend = CountedBackend(d2h_bytes_per_s=1e9, h2d_bytes_per_s=1e9)
    engine = Engine(backend, [HostTier(backend, 1 << 28, segment_bytes=1 << 20)], min_bytes=1024)
    recompute_policy = RecomputePolicy(engine, Level.SAVE_ALL)
    manager = Manager(model, find_layers(model), engine, recompute_policy=recompute_policy)
    placements, settings = settings_of(plan, manager.layers)
    engine.place(placements)
    recompute_policy.choose(settings)
    want = train(reference, lambda step: forward(reference, step), steps=2)
    assert_equal(train(model, lambda step: forward(model, step), manager, steps=2), want)
    assert recompute_policy.refused == {}
    with monkeypatch.context() as patch:
        with manager:
            loss = forward(model, 0)
        held = Held(patch)
        loss.backward()
    for name, part in cut.items():
        assert held.tokens[name] == round(part.piece * TOKENS)
        assert held.most[name] == part.held_bytes(known)
    model.zero_grad(set_to_none=True)
    device = CountedDevice(model)
    with device:
        with manager:
            loss = forward(model, 0)
        loss.backward()
    assert LEAST_USED * plan.stages[0].peak_device_bytes <= device.top <= plan.stages[0].peak_device_bytes
    manager.close()
