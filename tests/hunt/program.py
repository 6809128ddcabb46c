"""A random program as data: the statements of its layers, of its model and of its steps; and as text that Python runs.

Nothing in it refers to a statement's position, so that any of them can be taken out: `Line.plain` stands in for one whose
result is used, `<L2>` is layer 2 modulo their number.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from tests.hunt import names as names_of_programs


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One statement with its variables."""

    name: str
    text: str
    """Its lines; `<0>` stands for the first of `blocks`."""
    plain: str = ""
    """The least that gives its result a value."""
    declared: tuple[str, ...] = ()
    """Lines of the construction of the module that it is in."""
    blocks: tuple[Body, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Body:
    """Statements, and what they end with."""

    lines: tuple[Line, ...]
    results: tuple[str, ...]
    """Terms of a sum of shape (b, s, h)."""
    ending: str
    """`<R>` stands for the sum."""

    def written(self) -> list[str]:
        """Its lines as Python has them."""
        found: list[str] = []
        for line in self.lines:
            text = line.text
            for number, block in enumerate(line.blocks):
                text = text.replace(f"<{number}>", "\n    ".join(block.written()))
            found += text.split("\n")
        return [*found, *self.ending.replace("<R>", " + ".join(self.results)).split("\n")]

    def declared(self) -> list[str]:
        """Lines of the construction."""
        inner = (block.declared() for line in self.lines for block in line.blocks)
        return [*(each for line in self.lines for each in line.declared), *(each for some in inner for each in some)]

    def names(self) -> Iterator[str]:
        """Names of its statements."""
        for line in self.lines:
            yield line.name
            for block in line.blocks:
                yield from block.names()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One training step."""

    name: str
    text: str
    tokens: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """A random program."""

    seed: int
    kinds: tuple[Body, ...]
    """Forwards of its classes of layers."""
    layers: tuple[int, ...]
    """The class of each layer."""
    model: Body
    wiring: tuple[Line, ...]
    steps: tuple[Step, ...]
    dtype: torch.dtype
    attached: bool
    """Whether the manager is attached to the model; else steps enter it."""

    @property
    def statements(self) -> frozenset[str]:
        """Names of all statements, of layers, model, wiring and steps."""
        bodies = [*(self.kinds[kind] for kind in self.layers), self.model]
        inner = {name for body in bodies for name in body.names()}
        return frozenset(inner | {line.name for line in self.wiring} | {f"step: {step.name}" for step in self.steps})

    @property
    def operators(self) -> frozenset[str]:
        """Operators of torch's samples in it."""
        return frozenset(re.findall(r"Sampled\('([^']*)'", self.text))

    @property
    def text(self) -> str:
        """Its classes and steps in Python, over the names of names.py."""
        found: list[str] = []
        for number in sorted(set(self.layers)):
            body = self.kinds[number]
            found += [
                f"class Layer{number}(nn.Module):",
                "    def __init__(self):",
                "        super().__init__()",
                "        self.calls, self.aside = 0, None",
                *(f"        {line}" for line in body.declared()),
                "",
                "    def forward(self, x, mask, rotary, more=None):",
                "        B, S = x.shape[:2]",
                *(f"        {line}" for line in body.written()),
                "",
            ]
        wired = [text for line in self.wiring for text in (*line.declared, *line.text.split("\n"))]
        found += [
            "class Model(Stack):",
            "    def __init__(self):",
            f"        super().__init__([{', '.join(f'Layer{kind}' for kind in self.layers)}])",
            *(f"        {line}" for line in (*self.model.declared(), *wired)),
            "",
            "    def run(self, x, mask, rotary):",
            "        B, S = x.shape[:2]",
            *(f"        {line}" for line in self.model.written()),
            "",
        ]
        for number, step in enumerate(self.steps):
            found += [
                f"def step{number}(model, given, managed, note):  # {step.tokens} tokens",
                *(f"    {line}" for line in step.text.split("\n")),
                "",
            ]
        text = "\n".join(line.rstrip() for line in found)
        return re.sub(r"<L(\d+)>", lambda match: f"self.layers[{int(match[1]) % len(self.layers)}]", text)

    def made(self) -> tuple[nn.Module, list[Callable[..., None]]]:
        """A model with the same weights each time, and its steps."""
        names: dict[str, Any] = dict(vars(names_of_programs))
        names["TABLE"] = torch.linspace(0.5, 1.5, names_of_programs.HIDDEN).to(self.dtype)
        exec(compile(self.text, f"<program {self.seed}>", "exec"), names)
        torch.manual_seed(self.seed)
        return names["Model"]().to(self.dtype), [names[f"step{number}"] for number in range(len(self.steps))]
