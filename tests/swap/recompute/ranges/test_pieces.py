"""Replay in pieces of tokens: what it holds at once falls with the piece, is what the plan says, and no bit is another."""

from __future__ import annotations

import contextlib
import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from live_bytes import LiveBytes
from race_checker import CheckingBackend
from small_models import assert_equal, ids, stack, train
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes

from memo.errors import UsageError
from memo.kernels import pack_mask
from memo.manager.manager import Manager
from memo.swap.engine.engine import Engine
from memo.swap.layers import find_layers
from memo.swap.levels import LEAST_TOKENS, TokenLevels, setting_of, tile_of
from memo.swap.recompute.policy import RecomputePolicy
from memo.swap.recompute.ranges.ranged_plan import Piece, Span
from memo.swap.recompute.ranges.ranged_replay import RangedReplay, _bits_of
from memo.swap.recompute.tape.plan import Plan
from memo.swap.recompute.tape.settings import Settings
from memo.swap.tiers.host_and_disk import HostTier

SEQ = 96


def managed(model: torch.nn.Module, alpha: Any) -> Manager:
    backend = CheckingBackend("lazy", seed=0)
    engine = Engine(backend, [HostTier(backend, 1 << 24, segment_bytes=1 << 20)], min_bytes=512)
    return Manager(model, find_layers(model), engine, recompute_policy=RecomputePolicy(engine, setting_of(alpha)))


class Replays:
    """Plans and pieces of the replays in backward, and the most bytes that one held."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pieces: list[Piece] = []
        self.spans: list[Span] = []
        self.peak = 0
        """Of what the steps made and what is gathered for them, without what comes back from a tier."""
        self._live: LiveBytes | None = None
        run_piece, run_plan, reload = RangedReplay._run_piece, RangedReplay._run, RangedReplay._bring

        def noted(replay: RangedReplay, piece: Piece, take: Any) -> None:
            self.pieces.append(piece)
            self.spans.append(replay.span)
            run_piece(replay, piece, take)

        def measured(replay: RangedReplay, plan: Plan, bring: Any, give: Any) -> None:
            with LiveBytes() as self._live:
                run_plan(replay, plan, bring, _unseen(give, self._live))
            self.peak = max(self.peak, self._live.peak)
            self._live = None

        def reloaded(replay: RangedReplay, position: int) -> torch.Tensor:
            return reload(replay, position) if self._live is None else _unseen(reload, self._live)(replay, position)

        monkeypatch.setattr(
            Settings, "in_force", lambda settings: contextlib.nullcontext()
        )  # or it runs outside of the mode
        monkeypatch.setattr(RangedReplay, "_run_piece", noted)
        monkeypatch.setattr(RangedReplay, "_run", measured)
        monkeypatch.setattr(RangedReplay, "_bring", reloaded)


def _unseen(call: Any, live: LiveBytes) -> Any:
    """The call without the mode; the memory that it returns is not counted."""

    def run(*args: Any) -> Any:
        with _disable_current_modes():
            result = call(*args)
        if isinstance(result, torch.Tensor):
            live._known.add(result.untyped_storage())
        return result

    return run


def run(monkeypatch: pytest.MonkeyPatch, levels: TokenLevels, batch: int = 2) -> Replays:
    model = stack()
    manager = managed(model, levels)
    with monkeypatch.context() as patch:
        got = train(model, lambda step: model(ids(step, batch, seq=SEQ)), manager, steps=2)
        reference = stack()
        assert_equal(got, train(reference, lambda step: reference(ids(step, batch, seq=SEQ)), steps=2))
        replays = Replays(patch)
        with manager:
            loss = model(ids(0, batch, seq=SEQ))
        loss.backward()
    assert manager.stats.live_entries == 0
    manager.close()
    return replays


def in_pieces(tokens: int, all: float = 0.0, matmuls: float = 0.0) -> TokenLevels:
    return TokenLevels(all=all, matmuls=matmuls, attention=1 - all - matmuls, piece=tokens / SEQ)


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize(("all", "matmuls"), [(0.0, 0.0), (0.25, 0.0), (0.25, 0.75), (0.0, 1.0)])
def test_a_smaller_piece_holds_less_and_gives_the_same(
    all: float, matmuls: float, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = run(monkeypatch, in_pieces(SEQ - 1, all, matmuls), batch)
    small = run(monkeypatch, in_pieces(32, all, matmuls), batch)
    assert [len(replays.pieces) for replays in (whole, small)] == [2 if all else 4, 6]  # of two layers; the last stays
    assert small.peak < whole.peak
    for replays in (whole, small):
        assert all_are_long_enough(replays.pieces)
        assert replays.peak == max(span.held_bytes for span in replays.spans)
        widest = max(piece.stop - piece.first for piece in replays.pieces)
        assert replays.peak * SEQ == replays.spans[0].plan_for(SEQ).held_bytes * widest, "in proportion to its tokens"


@pytest.mark.parametrize(("before", "tokens", "width"), [(1, 64, 3), (2, 48, 5), (3, 20, 4), (2, 21, 3)])
def test_the_bits_of_a_piece_are_those_of_its_tokens(before: int, tokens: int, width: int) -> None:
    mask = torch.rand(before, tokens, width, generator=torch.Generator().manual_seed(0)) > 0.5
    for first, stop in ((0, 16), (8, tokens), (5, 17), (0, tokens)):
        part = mask[:, first:stop].contiguous()
        assert torch.equal(_bits_of(pack_mask(mask), [before, tokens, width], 1, first, stop - first), pack_mask(part))


def all_are_long_enough(pieces: list[Piece]) -> bool:
    return all(piece.stop - piece.first >= LEAST_TOKENS for piece in pieces)


@pytest.mark.parametrize(("piece", "most"), [(0.5, 48), (0.7, 64), (0.9, 80), (0.01, 32), (1.0, None)])
def test_pieces_are_whole_tiles_and_leave_no_rest_that_is_too_short(piece: float, most: int | None) -> None:
    assert TokenLevels(attention=1.0, piece=piece).piece_tokens(SEQ) == most


@pytest.mark.parametrize("piece", [0.0, -1.0, 1.5, math.nan])
def test_a_piece_is_a_fraction(piece: float) -> None:
    with pytest.raises(UsageError, match="piece"):
        TokenLevels(attention=1.0, piece=piece)


@pytest.mark.parametrize("tiles", [0, 1, 2])
@pytest.mark.parametrize("stop", [40, 48, 100, 1000, 4096, 5001])
@pytest.mark.parametrize("piece", [32, 40, 256, 300, 512])
def test_pieces_cover_a_span_and_none_is_larger_than_asked(tiles: int, stop: int, piece: int) -> None:
    first = tiles * tile_of(stop)
    span = Span.__new__(Span)
    span.first, span.stop, span.piece = first, stop, piece
    span.rows = SimpleNamespace(tokens=stop)  # type: ignore[assignment]
    pieces = span.pieces
    assert [pieces[0].stop, pieces[-1].first] == [stop, first]
    assert all(after.stop == before.first for before, after in itertools.pairwise(pieces))
    assert all_are_long_enough(pieces) or len(pieces) == 1
    assert all(each.first % tile_of(stop) == 0 for each in pieces)
    if piece >= 32 and piece >= tile_of(stop):
        assert max(each.stop - each.first for each in pieces) <= piece


def test_without_pieces_whole_storages_are_replayed_at_alpha_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(monkeypatch, TokenLevels.of_alpha(0.0)).pieces == []


class Lower(nn.Module):
    """A block in which each token sees those before it: by a triangle that is cut out of what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, SEQ), nn.Linear(SEQ, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shown = self.up(self.norm(x)).tril(2).mul(2).triu_(-40)
        return x + self.down(shown.sin())  # type: ignore[no-any-return]


@pytest.mark.parametrize("levels", [in_pieces(SEQ - 1), in_pieces(32), in_pieces(24, 0.25), in_pieces(24, 0.25, 0.5)])
def test_a_triangle_of_a_piece_is_that_of_its_tokens(levels: TokenLevels) -> None:
    model, reference = stack(make=Lower), stack(make=Lower)
    manager = managed(model, levels)
    got = train(model, lambda step: model(ids(step, seq=SEQ)), manager)
    assert_equal(got, train(reference, lambda step: reference(ids(step, seq=SEQ))))
    told = manager.explain(0)
    assert told.ranges, "in ranges of tokens"
    assert all(row.replayed_tokens for row in told.rows if row.operator in ("aten.tril", "aten.triu_"))
    manager.close()
