"""Whatever draws from Python's or NumPy's generator is seen, and nothing else."""

from __future__ import annotations

import random

import numpy as np
import pytest

from memo.swap.recompute.guards import python_rng
from memo.swap.recompute.guards.python_rng import drawn_by_python

DRAWS = [
    random.random,
    lambda: random.gauss(0, 1),
    lambda: random.choice("ab"),
    lambda: random.seed(3),
    lambda: random.seed(4),
    np.random.rand,
    np.random.randn,
    lambda: np.random.permutation(3),
    lambda: np.random.seed(3),
    lambda: np.random.seed(4),
    lambda: np.random.seed([3, 4]),
    lambda: np.random.seed([3, 5]),
]


@pytest.fixture(params=["read where they are", "asked for"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The states of the generators."""
    if request.param == "asked for":
        monkeypatch.setattr(python_rng, "_state_of", lambda generator: None)
        monkeypatch.setattr(python_rng, "_state_of_source", lambda source: None)
    monkeypatch.setattr(python_rng, "_NUMPY", {})


@pytest.mark.usefixtures("way")
def test_each_draw_is_seen() -> None:
    for draw in (*DRAWS, *DRAWS, *(4 * [np.random.randn]), *(1300 * [random.random])):
        before = drawn_by_python()
        assert drawn_by_python() == before
        draw()
        assert drawn_by_python() != before, draw


@pytest.mark.usefixtures("way")
def test_draws_from_another_source_of_bits_are_seen() -> None:
    ours = np.random.get_bit_generator()
    before = drawn_by_python()
    np.random.set_bit_generator(np.random.PCG64(3))
    try:
        other = drawn_by_python()
        assert other != before
        np.random.rand()
        assert drawn_by_python() != other
    finally:
        np.random.set_bit_generator(ours)
    assert drawn_by_python() == before


def test_generators_of_their_own_and_torch_are_no_draws() -> None:
    import torch

    before = drawn_by_python()
    random.Random(3).random()
    np.random.default_rng(3).random()
    torch.rand(3)
    assert drawn_by_python() == before


def test_the_states_are_read_where_they_are_in_this_interpreter() -> None:
    """Otherwise each layer's forward pays for two copies of them."""
    assert python_rng._state_of(python_rng._GENERATOR) is not None
    assert python_rng._state_of_source(np.random.get_state.__self__._bit_generator) is not None  # type: ignore[attr-defined]
