"""The exchange of the embedding's gradient as a dimension of a search."""

from __future__ import annotations

import dataclasses
import math

import pytest
from slow_tests import first
from small_clusters import all_candidates, random_space

from memo.gpt import EmbeddingGradients, GPTConfig
from memo.mip.activation import find_plan
from memo.search import Candidate, Space, search_layouts

EQUAL = 1e-9


def untied(seed: int, way: EmbeddingGradients = EmbeddingGradients.AUTO, *, vocab_size: int = 1 << 15) -> Space:
    """A small cluster with a model of its own output projection, and a table that dwarfs a step's tokens."""
    space = random_space(seed, most_gpus=4)
    assert isinstance(space.request.config, GPTConfig)
    config = dataclasses.replace(space.request.config, tie_embeddings=False, vocab_size=vocab_size)
    budgets = dataclasses.replace(space.request.budgets, device_bytes=1 << 40)
    return dataclasses.replace(
        space, request=dataclasses.replace(space.request, config=config, budgets=budgets, embedding=way)
    )


def steps(space: Space) -> dict[Candidate, float]:
    found = {}
    for candidate in all_candidates(space):
        request = space.request_of(candidate)
        plans = [plan for tiles in request.tiles if (plan := find_plan(request.problem(tiles))) is not None]
        if plans:
            found[candidate] = min(plan.step_s for plan in plans)
    return found


@pytest.mark.parametrize("seed", first(range(12), 4))
def test_the_answer_is_that_of_planning_both_exchanges_of_every_candidate(seed: int) -> None:
    space = untied(seed)
    found, known = search_layouts(space, wanted=1), steps(space)
    assert found.best[0].step_s == pytest.approx(min(known.values(), default=math.inf), rel=EQUAL)
    assert (
        found.candidates
        == len(all_candidates(space))
        == sum(space.count(shape, setting) for shape in space.shapes for setting in space.settings(shape))
    )


def test_some_cluster_has_its_shortest_step_with_rows_and_some_without() -> None:
    chosen = {search_layouts(untied(seed), wanted=1).best[0].candidate.sparse_embedding for seed in range(12)}
    assert chosen == {True, False}


def test_rows_are_tried_where_they_can_be_fewer_bytes_and_asked_for_where_they_are_possible() -> None:
    space = untied(5)
    ways = {one.sparse_embedding for one in all_candidates(space)}
    assert ways == {True, False}
    assert not any(one.sparse_embedding for one in all_candidates(untied(5, EmbeddingGradients.DENSE)))
    assert not any(one.sparse_embedding for one in all_candidates(untied(5, vocab_size=64)))
    for one in all_candidates(untied(5, EmbeddingGradients.SPARSE)):
        possible = one.shape.dp * one.shape.cp > 1 and one.zero in (0, 3) and one.sharded_over is None
        assert one.sparse_embedding is possible
