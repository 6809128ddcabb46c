"""Shrinks a program that fails to one of fewer statements that fails in the same way.

Delta debugging: statements are taken out in halves, quarters, and one by one, and what cannot go is made plain, until
nothing more can be taken out.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from tests.hunt.names import TOKENS
from tests.hunt.program import Body, Line, Program
from tests.hunt.step_statements import STEPS


def shrink(program: Program, fails: Callable[[Program], bool], *, limit_s: float = 60.0) -> Program:
    """The smallest program found within the limit of which `fails` is true, as it is of the given one."""
    end = time.monotonic() + limit_s
    while True:
        for smaller in _smaller(program):
            if time.monotonic() > end:
                return program
            if fails(smaller):
                program = smaller
                break
        else:
            return program


def _smaller(program: Program) -> Iterator[Program]:
    """Programs with less in them, the greatest differences first."""

    def changed(**parts: Any) -> Program:
        return dataclasses.replace(program, **parts)

    if len(program.steps) > 1:
        for steps in _parts(program.steps):
            if steps:
                yield changed(steps=steps)
    for wiring in _parts(program.wiring):
        yield changed(wiring=wiring)
    for body in _bodies(program.model):
        yield changed(model=body)
    if len(program.layers) > 2:
        yield changed(layers=program.layers[:-1])
    if len(set(program.layers)) > 1:
        for kind in set(program.layers):
            yield changed(layers=(kind,) * len(program.layers))
    for number in sorted(set(program.layers)):
        for body in _bodies(program.kinds[number]):
            yield changed(kinds=(*program.kinds[:number], body, *program.kinds[number + 1 :]))
    if program.attached:
        yield changed(attached=False)
    if program.dtype is not torch.float32:
        yield changed(dtype=torch.float32)
    plain = STEPS["plain"].text
    for at, step in enumerate(program.steps):
        for smaller in ({"name": "plain", "text": plain}, {"tokens": TOKENS}):
            other = dataclasses.replace(step, **smaller)
            if other != step:
                yield changed(steps=(*program.steps[:at], other, *program.steps[at + 1 :]))


def _parts(items: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """The items without some that follow each other: a half of them, a quarter, down to one."""
    size = len(items)
    while size:
        for at in range(0, len(items), size):
            yield items[:at] + items[at + size :]
        size //= 2


def _bodies(body: Body) -> Iterator[Body]:
    for lines in _parts(body.lines):
        yield dataclasses.replace(body, lines=lines)
    for result in body.results if len(body.results) > 1 else ():
        yield dataclasses.replace(body, results=(result,))
    if body.results != ("(x)",):
        yield dataclasses.replace(body, results=("(x)",))
    for at, line in enumerate(body.lines):
        for other in _lines(line):
            yield dataclasses.replace(body, lines=(*body.lines[:at], other, *body.lines[at + 1 :]))
    for ending in ("return <R>", "return x + 0.50 * F.layer_norm(<R>, (H,))"):
        if body.ending == ending:
            break
        yield dataclasses.replace(body, ending=ending)


def _lines(line: Line) -> Iterator[Line]:
    if line.plain and line.text != line.plain:
        yield Line(name="plain", text=line.plain, plain=line.plain)
    for number, block in enumerate(line.blocks):
        for smaller in _bodies(block):
            yield dataclasses.replace(line, blocks=(*line.blocks[:number], smaller, *line.blocks[number + 1 :]))
