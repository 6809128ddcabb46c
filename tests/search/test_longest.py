"""The longest sequence of a search is that of asking the planner for every candidate at every length."""

from __future__ import annotations

import dataclasses

import pytest
from slow_tests import first
from small_clusters import all_candidates, random_space

from memo.mip.activation import fits
from memo.search import Space, longest_that_fits

TILE = 64
LONGER = (1, 2, 3, 5, 8, 13, 21, 34)
"""Tiles of every GPU beyond the longest sequence at which nothing may fit."""


def of_length(space: Space, tokens: int) -> Space:
    layout = dataclasses.replace(space.request.layout, tokens=tokens)
    return dataclasses.replace(space, request=dataclasses.replace(space.request, layout=layout))


def holds(space: Space) -> bool:
    """Whether any candidate of the space has a plan."""
    requests = (space.request_of(candidate) for candidate in all_candidates(space))
    return any(fits(request.problem(tiles)) for request in requests for tiles in request.tiles)


@pytest.mark.parametrize("seed", first(range(16), 5))
def test_it_is_the_longest_length_that_any_candidate_fits(seed: int) -> None:
    space = random_space(2000 + seed, most_gpus=4)
    step = TILE * space.gpus  # which all ranks divide
    found = longest_that_fits(of_length(space, step * space.request.config.heads), tile=TILE)
    reached = 0
    if found is not None:
        reached = found.tokens
        assert holds(of_length(space, reached))
        assert found.candidate in all_candidates(found.space)
        assert found.binds is not None
        assert reached % found.tile == 0
    following = reached // step * step
    assert not any(holds(of_length(space, following + step * more)) for more in LONGER)


def test_more_memory_is_a_longer_sequence_and_fixed_dimensions_no_longer_one() -> None:
    space = of_length(random_space(2010, most_gpus=4), TILE * 16)
    budgets = space.request.budgets
    assert (found := longest_that_fits(space, tile=TILE)) is not None
    larger = dataclasses.replace(budgets, device_bytes=2 * budgets.device_bytes)
    more = dataclasses.replace(space, request=dataclasses.replace(space.request, budgets=larger))
    assert (longer := longest_that_fits(more, tile=TILE)) is not None
    assert longer.tokens > found.tokens
    alone = longest_that_fits(dataclasses.replace(space, fixed={"dp": 1, "tp": 1, "cp": 1, "pp": 1}), tile=TILE)
    assert alone is not None
    assert alone.candidate.shape.gpus == 1 < found.candidate.shape.gpus
    assert alone.tokens < found.tokens


def test_where_the_shortest_sequence_does_not_fit_there_is_none() -> None:
    space = of_length(random_space(2010, most_gpus=4), TILE * 16)
    budgets = dataclasses.replace(space.request.budgets, device_bytes=1 << 20)
    less = dataclasses.replace(space, request=dataclasses.replace(space.request, budgets=budgets))
    assert longest_that_fits(less, tile=TILE) is None
