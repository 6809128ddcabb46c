"""Trials of a layer's calls: each layer once, and at a new length one of each class; a bounded number is remembered."""

from __future__ import annotations

import random
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from small_models import Block, Stack, assert_equal, ids, stack, train
from torch import nn

import memo
import memo.swap.recompute.token_wise
import memo.swap.recompute.trial_cache
from memo.lru import LRU
from memo.swap.token_levels import Level

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from memo.swap.recompute.token_split import Division

LAYERS = 4


@pytest.fixture
def tried(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The layers that were tried out, in order."""
    names: list[str] = []
    try_out = memo.swap.recompute.token_wise.try_out

    def noted(division: Division, device: torch.device, *, exact: bool) -> float:
        names.append(division.calls[0].name)
        return try_out(division, device, exact=exact)

    monkeypatch.setattr(memo.swap.recompute.token_wise, "try_out", noted)
    return iter([names]).__next__()


def offload(model: nn.Module, tmp_path: Path, **options: Any) -> memo.Manager:
    return memo.offload(model, **{"disk": tmp_path, "min_bytes": 64, "alpha": 0.25, **options})


def over(lengths: Sequence[int], module: Stack) -> Callable[[int], torch.Tensor]:
    return lambda step: module(ids(step, batch=1 + step % 3, seq=lengths[step]))


def equal_over(
    lengths: Sequence[int], tmp_path: Path, *, make: Callable[[], nn.Module] | None = None, **options: Any
) -> memo.Manager:
    """Trains over these lengths, with memo and without it."""
    model, reference = stack(layers=LAYERS, make=make), stack(layers=LAYERS, make=make)
    manager = offload(model, tmp_path, **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*whole")
        got = train(model, over(lengths, model), manager, steps=len(lengths))
    assert_equal(got, train(reference, over(lengths, reference), steps=len(lengths)))
    assert manager.stats.bytes_recomputed > 0
    manager.close()
    return manager


@pytest.mark.parametrize("options", [{"alpha": 0.25}, {"alpha": (0.25, 0.5, 0.25)}, {"levels": {0: Level.SAVE_INPUT}}])
def test_at_a_new_length_one_layer_answers_for_all_like_it(
    options: dict[str, Any], tried: list[str], tmp_path: Path
) -> None:
    equal_over([48, 31, 64, 48, 57], tmp_path, **{"alpha": 0.25, **options})
    first = [f"layers.{n}" for n in range(LAYERS)]
    each = ["layers.0", "layers.1"] if "levels" in options else ["layers.0"]  # one of them runs again whole
    assert tried == [*first, *each, *each, *each], "48 tokens came twice"


def test_a_length_that_was_seen_needs_no_trial(tried: list[str], tmp_path: Path) -> None:
    equal_over([48, 31, 64, 48, 31, 64], tmp_path)
    assert len(tried) == LAYERS + 2


def test_a_layer_of_another_width_answers_for_itself(tried: list[str], tmp_path: Path) -> None:
    """Also where nothing that is saved tells of the width: the bottleneck's weights are frozen."""
    made = iter([8, 8, 16, 8] * 2)

    class Adapted(Block):
        def __init__(self) -> None:
            super().__init__(32, 2)
            width = next(made)
            self.adapter = nn.Sequential(nn.Linear(32, width), nn.Linear(width, 32)).requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x + self.adapter(x))

    equal_over([48, 31], tmp_path, make=Adapted)
    assert tried[LAYERS:] == ["layers.0", "layers.2"]


def test_a_trial_that_fails_at_some_length_speaks_for_its_layer_alone(tried: list[str], tmp_path: Path) -> None:
    made = iter(range(2 * LAYERS))

    class Fickle(Block):
        """The first of them draws a number above some length, for nothing."""

        def __init__(self) -> None:
            super().__init__(32, 2)
            self.draws = next(made) % LAYERS == 0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.draws and x.size(1) > 40:
                random.random()
            return super().forward(x)

    manager = equal_over([31, 48, 47], tmp_path, make=Fickle)
    use = manager.report().tokenwise
    assert use is not None
    assert set(use.refused) == {"layers.0"}
    assert tried[LAYERS:] == ["layers.1", "layers.1"]


def test_levels_that_a_layer_had_never_are_tried_by_each(tried: list[str], tmp_path: Path) -> None:
    model = stack(layers=LAYERS)
    manager = offload(model, tmp_path)
    train(model, over([48, 48], model), manager, steps=1)
    manager.choose_levels(dict.fromkeys(range(LAYERS), (0.25, 0.5, 0.25)))
    train(model, over([48, 48], model), manager, steps=1)
    assert len(tried) == 2 * LAYERS
    manager.close()


def test_what_is_remembered_of_ever_new_lengths_is_bounded(
    tried: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also of layers that are refused at each; what was forgotten is tried again when it comes back."""
    for bound in ("MOST_SHOWN", "MOST_REFUSED"):
        monkeypatch.setattr(memo.swap.recompute.trial_cache, bound, 4)
    made = iter(range(2 * LAYERS))

    class Strange(Block):
        def __init__(self) -> None:
            super().__init__(32, 2)
            self.rolls = next(made) % LAYERS == 1

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x.roll(1, 1) if self.rolls else x)

    lengths = [*range(30, 42), 41, 30]
    manager = equal_over(lengths, tmp_path, make=Strange)
    trials = manager._tokenwise._trials
    remembered = [*trials._refused.values(), *(known for alike in trials._classes.values() for known in alike.all())]
    assert {len(known) for known in remembered} == {4}
    assert tried.count("layers.0") == len(lengths)  # the last two came with other batches before
    assert "layers.1" not in tried


@pytest.mark.parametrize("options", [{}, {"levels": dict.fromkeys(range(LAYERS), Level.SAVE_INPUT)}])
@pytest.mark.parametrize("short", [1, 3])
def test_a_trial_that_finds_no_memory_is_made_again_at_the_next_call_but_not_for_ever(
    short: int, options: dict[str, Any], tried: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first layer's, whose recompute allocates too much: here in its own activation."""
    gelu, failed = nn.functional.gelu, 0

    def allocates(x: torch.Tensor) -> torch.Tensor:
        nonlocal failed
        if failed < min(tried.count("layers.0"), short):
            failed += 1
            raise torch.OutOfMemoryError("no memory")
        return gelu(x)

    monkeypatch.setattr(nn.functional, "gelu", allocates)
    model = stack(layers=LAYERS)
    manager = offload(model, tmp_path, **options)
    refused = []
    for _ in range(5):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*no device memory to try|.*as chosen")
            train(model, over([48], model), manager, steps=1)
        use = manager.report().tokenwise
        assert use is not None
        refused.append("layers.0" in use.refused)
    assert refused == [True, False, False, False, False] if short == 1 else all(refused)
    assert tried.count("layers.0") == {1: 2, 3: 3}[short]
    manager.close()


def test_what_was_used_last_stays() -> None:
    recent: LRU[str, int] = LRU(2)
    recent["a"], recent["b"] = 1, 2
    assert recent.get("a") == 1
    recent["c"] = 3
    assert (recent.get("a"), recent.get("b"), recent.get("c"), len(recent)) == (1, None, 3, 2)
