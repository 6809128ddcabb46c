"""Random programs of layers, three steps each: bit for bit as without memo at every level, or torch itself raises."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import pytest
import torch
from random_layers import POINTS, Program, compare, program
from random_statements import STATEMENTS

if TYPE_CHECKING:
    from collections.abc import Iterator

SOME = {name: POINTS[name] for name in ("1", "0.5", "0")}


def _checked(made: Program, points: dict[str, object], kinds: tuple[torch.dtype, ...]) -> int:
    outcome = compare(made, points, kinds)
    assert not outcome.failures, "\n".join([f"seed {made.seed}", *outcome.failures, made.text])
    return outcome.compared


@pytest.mark.parametrize("seed", range(4))
def test_random_layers_are_equal_bit_for_bit(seed: int) -> None:
    _checked(program(seed), SOME, (torch.float32,))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 1100, 10))
def test_many_random_layers_are_equal_bit_for_bit_at_every_level(first: int) -> None:
    compared = sum(
        _checked(program(seed), POINTS, (torch.float32, torch.bfloat16)) for seed in range(first, first + 10)
    )
    assert compared > 5 * len(POINTS)


def _alone() -> Iterator[Program]:
    """A layer with each statement of the catalogue in it, and a product around it."""
    for name in STATEMENTS:
        if STATEMENTS[name].weight:
            yield program(7, only=name)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_statement_alone_is_equal_bit_for_bit() -> None:
    not_run = []
    for made in _alone():
        outcome = compare(made, SOME, (torch.float32,))
        assert not outcome.failures, "\n".join([*outcome.failures, made.text])
        if not outcome.compared:
            not_run.append((made.statements, outcome.discarded))
    assert not not_run


def test_a_program_that_differs_is_reported() -> None:
    """The comparison sees one bit: the layer's path depends on whether memo is there."""
    made = program(3)
    text = made.text.replace("        B, S = x.shape[:2]\n", "        B, S = x.shape[:2]\n        x = x * watched()\n")
    assert text != made.text
    watched = "def watched():\n    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)\n"
    watched += "    return 1.0 if hooks is None else 1.0000002\n\n"
    outcome = compare(dataclasses.replace(made, text=watched + text), {"1": 1.0}, (torch.float32,))
    assert "differs in loss of step 0" in outcome.failures[0]
