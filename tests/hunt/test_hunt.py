"""The hunt: programs are equal with and without memo, a find is found and shrunk, and seeded faults are found."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from memo.swap.backends.cpu import ThreadStream
from memo.swap.engine.handles import Handle
from memo.swap.recompute.tape.tape import Tape
from tests.hunt.comparison import Outcome, compare
from tests.hunt.drawing import catalogued, drawn, with_only
from tests.hunt.levels import LEVELS, levels_of
from tests.hunt.program import Program
from tests.hunt.shrinking import shrink

SOME = ("1", "0.5", "0")


def _checked(program: Program, levels: Sequence[str]) -> Outcome:
    outcome = compare(program, levels)
    told = [f"{find.level}: {find.kind}: {find.told}" for find in outcome.finds]
    assert not told, "\n".join([f"seed {program.seed}", *told, program.text])
    return outcome


@pytest.mark.parametrize("first", range(0, 30, 10))
def test_random_programs_are_equal_bit_for_bit(first: int) -> None:
    compared = sum(len(_checked(drawn(seed), levels_of(seed, 2)).compared) for seed in range(first, first + 10))
    assert compared > 10


@pytest.mark.slow
@pytest.mark.parametrize("first", range(1000, 1200, 20))
def test_many_random_programs_are_equal_bit_for_bit_at_every_level(first: int) -> None:
    compared = sum(len(_checked(drawn(seed), levels_of(seed, 3)).compared) for seed in range(first, first + 20))
    assert compared > 30


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_statement_alone_is_equal_bit_for_bit() -> None:
    not_run = {}
    for name in catalogued():
        outcome = _checked(with_only(name.removeprefix("step: ")), SOME)
        if outcome.discarded:
            not_run[name] = outcome.discarded
    assert not not_run


def test_a_seed_gives_the_same_program_again() -> None:
    assert drawn(5) == drawn(5)
    assert len({drawn(seed).text for seed in range(20)}) == 20


def test_a_program_that_differs_by_one_bit_is_reported_and_shrunk_to_what_differs() -> None:
    """A layer's path depends on whether memo is there."""
    program = with_only("experts in place")
    watched = "def watched():\n    hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)\n"
    watched += "    return 1.0 if hooks is None else 1.0000002\n"
    (body,) = program.kinds
    line = dataclasses.replace(body.lines[0], name="watched", text=f"{watched}x = x * watched()", plain="", declared=())
    body = dataclasses.replace(body, lines=(body.lines[0], line, *body.lines[1:]))
    changed = dataclasses.replace(program, kinds=(body,))
    assert [find.kind for find in compare(changed, ["1"]).finds] == ["differs in loss"]
    small = shrink(changed, lambda smaller: bool(compare(smaller, ["1"]).finds))
    assert compare(small, ["1"]).finds
    assert [line.name for line in small.kinds[0].lines] == ["watched"]
    assert (len(small.model.lines), len(small.steps)) == (1, 1)


def _no_version_check(patch: pytest.MonkeyPatch) -> None:
    """Tensors that have changed since they were saved are given back."""
    made: Callable[..., None] = Handle.__init__

    def make(self: Handle, tensor: torch.Tensor, *args: Any) -> None:
        made(self, tensor, *args)
        self.guard = torch.empty(0, dtype=tensor.dtype)
        self.version = 0

    patch.setattr(Handle, "__init__", make)


def _stale_row(patch: pytest.MonkeyPatch) -> None:
    """The last bytes of a copy are those that lay in its place before."""
    moved = ThreadStream._move

    def move(self: ThreadStream, target: torch.Tensor, source: torch.Tensor) -> None:
        rest = len(source) - 64 if len(source) > 512 else len(source)
        moved(self, target[:rest], source[:rest])

    patch.setattr(ThreadStream, "_move", move)


def _random_repeated(patch: pytest.MonkeyPatch) -> None:
    """Random numbers are drawn again."""
    known = Tape._why_opaque

    def why(self: Tape, *args: Any) -> str | None:
        reason = known(self, *args)
        return None if reason == "it draws random numbers" else reason

    patch.setattr(Tape, "_why_opaque", why)


FAULTS = {fault.__name__.strip("_"): fault for fault in (_no_version_check, _stale_row, _random_repeated)}
WITHIN = 20
"""Programs, at three levels each, within which each fault is found."""


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_the_engine_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hunt that can't find is worth nothing."""
    FAULTS[name](monkeypatch)
    assert any(compare(drawn(seed), levels_of(seed, 3)).finds for seed in range(WITHIN)), f"not within {WITHIN}"


def test_a_process_that_draws_levels_draws_each_of_them() -> None:
    assert {level for seed in range(100) for level in levels_of(seed, 3)} == set(LEVELS)
