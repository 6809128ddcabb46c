"""Replay in pieces of tokens: what it holds at once falls with the piece, is what the plan says, and no bit is another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from live_bytes import LiveBytes
from race_checker import CheckingBackend
from small_models import SEQ, assert_equal, ids, stack, train
from torch.utils._python_dispatch import _disable_current_modes

from memo.manager.manager import Manager
from memo.swap.engine.engine import Engine
from memo.swap.layers import find_layers
from memo.swap.recompute.policy import Tapes
from memo.swap.recompute.ranges.ranged_plan import Piece, Span
from memo.swap.recompute.ranges.ranged_replay import RangedReplay
from memo.swap.recompute.tape.plan import Plan
from memo.swap.tiers.host_and_disk import HostTier
from memo.swap.token_levels import LEAST_TOKENS, setting_of


def managed(model: torch.nn.Module, alpha: Any, **pieces: Any) -> Manager:
    backend = CheckingBackend("lazy", seed=0)
    engine = Engine(backend, [HostTier(backend, 1 << 24, segment_bytes=1 << 20)], min_bytes=512)
    return Manager(model, find_layers(model), engine, tokenwise=Tapes(engine, setting_of(alpha), **pieces))


class Replays:
    """Plans and pieces of the replays in backward, and the most bytes that one held."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pieces: list[Piece] = []
        self.spans: list[Span] = []
        self.peak = 0
        """Of what the steps made, without what is brought for them."""
        run_piece, run_plan = RangedReplay._run_piece, RangedReplay._run

        def noted(replay: RangedReplay, piece: Piece, take: Any) -> None:
            self.pieces.append(piece)
            self.spans.append(replay.span)
            run_piece(replay, piece, take)

        def measured(replay: RangedReplay, plan: Plan, bring: Any, give: Any) -> None:
            with LiveBytes() as live:
                run_plan(replay, plan, _unseen(bring, live), _unseen(give, live))
            self.peak = max(self.peak, live.peak)

        monkeypatch.setattr(RangedReplay, "_run_piece", noted)
        monkeypatch.setattr(RangedReplay, "_run", measured)


def _unseen(call: Any, live: LiveBytes) -> Any:
    """The call without the mode; the memory that it returns is not counted."""

    def run(*args: Any) -> Any:
        with _disable_current_modes():
            result = call(*args)
        if isinstance(result, torch.Tensor):
            live._known.add(result.untyped_storage())
        return result

    return run


def run(monkeypatch: pytest.MonkeyPatch, alpha: Any, batch: int = 2, **pieces: Any) -> Replays:
    model = stack()
    manager = managed(model, alpha, **pieces)
    with monkeypatch.context() as patch:
        got = train(model, lambda step: model(ids(step, batch)), manager, steps=2)
        reference = stack()
        assert_equal(got, train(reference, lambda step: reference(ids(step, batch)), steps=2))
        replays = Replays(patch)
        with manager:
            loss = model(ids(0, batch))
        loss.backward()
    assert manager.stats.live_entries == 0
    manager.close()
    return replays


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("alpha", [0.0, 0.25, (0.25, 0.5, 0.25), (0, 1, 0)])
def test_a_smaller_piece_holds_less_and_gives_the_same(alpha: Any, batch: int, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(monkeypatch, alpha, batch, piece=SEQ)
    small = run(monkeypatch, alpha, batch, piece=16)
    assert len(small.pieces) > len(whole.pieces) or alpha == (0.25, 0.5, 0.25)
    assert all(piece.stop - piece.first >= LEAST_TOKENS for piece in small.pieces)
    if len(small.pieces) > len(whole.pieces):
        assert small.peak < 0.75 * whole.peak
    for replays in (whole, small):
        assert replays.peak <= max(span.held_bytes for span in replays.spans)


def test_pieces_are_as_large_as_the_bound_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = run(monkeypatch, 0.0, piece=SEQ)
    held = whole.spans[0].held_bytes
    for most in (held, held // 2, held // 3 + 1, 1):
        bounded = run(monkeypatch, 0.0, most_held=most)
        widest = max(piece.stop - piece.first for piece in bounded.pieces)
        if most == 1:
            assert widest == LEAST_TOKENS  # the least that may be computed again
        else:
            assert bounded.peak <= most
            assert widest == {held: SEQ, held // 2: 24, held // 3 + 1: 16}[most]


def test_without_a_bound_whole_storages_are_replayed_at_alpha_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, 0.0).pieces == []
