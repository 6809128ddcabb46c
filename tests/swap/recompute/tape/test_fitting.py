"""A cut that fits a number of bytes: never over it, never slower than the corner of the curve below it, and soon found."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence

import pytest
import torch
from taped import record
from torch import nn
from torch.nn import functional as F

from memo.swap import Level
from memo.swap.recompute.tape import fitting
from memo.swap.recompute.tape.bans import banned
from memo.swap.recompute.tape.cut import CutProblem, cheapest, curve
from memo.swap.recompute.tape.fitting import fitting_cut
from memo.swap.recompute.tape.plan import problem_of
from memo.swap.recompute.tape.tape import Tape


def problem(links: int = 24, choices: Sequence[int] = (8, 64, 128, 256)) -> tuple[Tape, CutProblem, tuple[int, ...]]:
    """A chain of products and pointwise results of several widths."""
    drawn = random.Random(5)
    widths = [drawn.choice(choices) for _ in range(links + 1)]
    weights = [nn.Parameter(torch.randn(b, a) / 8) for a, b in itertools.pairwise(widths)]

    def layer(x: torch.Tensor) -> torch.Tensor:
        for weight in weights:
            x = F.linear(x, weight).sigmoid()
        return x

    taped = record(layer, torch.randn(64, widths[0], requires_grad=True))
    bans = banned(taped.tape, Level.SAVE_ATTENTION)
    return taped.tape, problem_of(taped.tape, bans, taped.there(), taped.wanted, (), taped.tape.costs), taped.wanted


@pytest.mark.parametrize("operators", [fitting.MOST_OPERATORS, 400])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.35, 0.5, 0.77, 1.0])
def test_it_keeps_no_more_than_the_target_and_replays_no_more_than_the_corner_below(
    share: float, operators: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fitting, "MOST_OPERATORS", operators)
    tape, cuts, wanted = problem()
    most, least = cheapest(cuts, 0, 1), cheapest(cuts, 1, 0)
    target = share * most.keep_cost + (1 - share) * least.keep_cost
    found = fitting_cut(tape, cuts, wanted, target)
    below = min((cut for cut in curve(cuts) if cut.keep_cost <= target), key=lambda cut: cut.replay_cost)
    assert found.keep_cost <= target
    assert found.replay_cost <= below.replay_cost
    if share in (0.0, 1.0):
        assert found == below


def test_between_corners_storages_are_added() -> None:
    """Alike ones lie on one line, of which only the ends are corners."""
    tape, cuts, wanted = problem(6, (64,))
    corners = curve(cuts)
    gaps = [(left.keep_cost + right.keep_cost) / 2 for left, right in itertools.pairwise(corners)]
    assert any(fitting_cut(tape, cuts, wanted, target) not in corners for target in gaps)


def test_with_too_few_bytes_the_fewest_are_kept() -> None:
    tape, cuts, wanted = problem(4)
    assert fitting_cut(tape, cuts, wanted, -1) == cheapest(cuts, 1, 0)


def test_cuts_tried_grow_with_the_storages_and_not_with_their_square(monkeypatch: pytest.MonkeyPatch) -> None:
    """A recurrence written out has hundreds of storages, and each cut takes milliseconds."""
    tape, cuts, wanted = problem(80, (64,))
    tried = []
    monkeypatch.setattr(fitting, "cheapest", lambda *args: tried.append(1) or cheapest(*args))
    target = (cheapest(cuts, 0, 1).keep_cost + cheapest(cuts, 1, 0).keep_cost) / 2.2
    fitting_cut(tape, cuts, wanted, target)
    assert len(wanted) / 2 < len(tried) < 4 * len(wanted)
