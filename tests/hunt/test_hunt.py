"""The hunt: programs are equal with and without memo, a find is found and shrunk, and seeded faults are found."""

from __future__ import annotations

import dataclasses
import os
import sys
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.results import newest_result
from memo.swap.backends.cpu import ThreadStream
from memo.swap.engine.handles import Handle
from memo.swap.recompute.tape.tape import Tape
from tests.hunt import __main__ as command, processes
from tests.hunt.comparison import Find, Outcome, compare
from tests.hunt.drawing import catalogued, drawn, with_only
from tests.hunt.levels import LEVELS, VERIFIED, levels_of
from tests.hunt.names import TOKENS
from tests.hunt.program import Body, Line, Program, Step
from tests.hunt.shrinking import shrink
from tests.hunt.step_statements import STEPS
from tests.hunt.totals import Totals

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


@pytest.mark.skipif(torch.cuda.is_available(), reason="processes are forks of this one, with its fakes, on a CPU alone")
def test_a_process_that_dies_is_a_find_and_one_that_loses_its_device_makes_way(monkeypatch: pytest.MonkeyPatch) -> None:
    lost: list[int] = []

    def compared(program: Program, levels: object) -> Outcome:
        if program.seed == 2:
            os._exit(3)
        if program.seed == 6:
            threading.Timer(0.05, os._exit, (4,)).start()  # after its answer
        lost[:] = [program.seed] if program.seed in (4, 5) else []
        return Outcome(discarded="torch alone" if program.seed == 4 else None)

    monkeypatch.setattr(processes, "compare", compared)
    monkeypatch.setattr(processes, "_is_lost", lambda: bool(lost))
    args = Namespace(workers=2, minutes=None, statements=9, shrink=1.0, at=["1"])
    found: dict[int, list[str]] = {}
    for seed, _, finds in processes.outcomes(range(9), args):
        found[seed] = [find.told for find, _ in finds]
        time.sleep(0.3 if seed == 6 else 0)
    told = {2: ["its process ended with 3"], 5: ["torch alone does not"]}
    later = [told for seed, told in found.items() if seed > 6 and told]
    assert {seed: told for seed, told in found.items() if seed < 7} == {seed: told.get(seed, []) for seed in range(7)}
    assert sorted(found) == [*range(9)]
    assert later in ([], [["its process ended with 4"]])
    assert [*processes.outcomes(range(8), Namespace(**vars(args) | {"minutes": -1.0}))] == []


def test_a_hunt_goes_on_behind_the_last_seed_and_adds_to_its_figures(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A program fails and another is discarded in each of two pieces; the second reads the first's result file."""

    def outcomes(seeds: range, args: object) -> Iterator[tuple[int, Outcome, list[tuple[Find, Program]]]]:
        find = Find(level="0", kind="differs in loss", told="loss")
        for seed in seeds:
            found = Outcome(
                compared={"0": True, "1": False}, moved_bytes={"0": 8}, refused={"1": 1}, whole=["a reason"]
            )
            yield seed, Outcome(discarded="no") if seed % 4 == 1 else found, [(find, drawn(0))] if seed % 4 == 3 else []

    monkeypatch.setattr(command, "outcomes", outcomes)
    monkeypatch.setenv("OUT", str(tmp_path))
    for programs, seeds in (("4", {3}), ("8", {3, 7})):
        monkeypatch.setattr(sys, "argv", ["hunt", "--programs", programs, "--write", "--continue"])
        assert command.main() == 1
        body = newest_result("hunt")
        assert body is not None
        assert {find["seed"] for find in body["finds"]} == seeds
    assert [(piece["seed"], piece["programs"], piece["comparisons"]) for piece in body["pieces"]] == [
        (0, 4, 6),
        (4, 4, 6),
    ]
    assert (body["programs"], body["comparisons"], body["discarded"], body["refused_loudly"]) == (8, 12, 2, {"1": 6})
    assert body["levels"]["0"] == {"compared": 6, "to_the_end": 6, "moved_bytes": 48, "recomputed_bytes": 0}
    whole = {"benchmark", "date", "begun", "written", "commit", "hardware"}
    assert Totals.of(body).body() == {name: value for name, value in body.items() if name not in whole}


def test_a_replay_that_is_refused_before_torch_itself_raises_is_no_find_and_what_came_before_is_compared() -> None:
    """The hunt once took the gradients of the step in which memo refused for wrong ones."""
    program = with_only("conv of one")
    turned = (
        "v5 = v4.view(B, S, 4, H // 4).transpose(1, 2)\nv5 = v5 * rotary[0] + v5.flip(-1)[..., : H // 4] * rotary[1]"
    )
    lines = (Line(name="input", text="v1 = x"), program.kinds[0].lines[1], Line(name="rotary", text=turned))
    layer = Body(lines=lines, results=("x",), ending="return x + 0.5 * F.layer_norm(<R>, (H,)), v5")
    changed = "v = x * 0.5\nv += self.hidden(self.layers[1](v, mask, rotary))"
    model = Body(lines=(Line(name="in place", text=changed),), results=("x",), ending="return <R>")
    steps = tuple(Step(name=name, text=STEPS[name].text, tokens=TOKENS) for name in ("under autocast", "plain"))
    program = dataclasses.replace(program, kinds=(layer,), model=model, steps=steps)
    outcome = compare(program, ["0"])
    assert (outcome.finds, outcome.refused, outcome.discarded) == ([], {"0": 1}, None)
    noted = ("isinstance(managed, type)", "True")  # what a step notes twice is compared twice
    told = "\n".join([*(f"note('before', torch.tensor({value}))" for value in noted), steps[0].text])
    program = dataclasses.replace(program, steps=(dataclasses.replace(steps[0], text=told), steps[1]))
    assert [find.told for find in compare(program, ["0"]).finds] == ["before, step 0"]


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


def test_writes_that_nothing_counts_are_compared_with_verify_alone_and_may_be_refused_there() -> None:
    program = with_only("uncounted, weights")
    program = dataclasses.replace(program, model=dataclasses.replace(program.model, results=("(v4)", "(v5)")))
    outcome = compare(program, ["0", "pieces"])
    assert (outcome.finds, outcome.discarded, set(outcome.compared)) == ([], None, set(VERIFIED))
    assert outcome.refused == {"0, verified": 1}
    assert set(compare(with_only("rewritten, fresh"), ["0"]).compared) == {"0"}
