"""Statements that programs are drawn from: a catalogue is text, so that a new habit is one more text.

Each has a name, a weight in the draw, and the shape of its result; then the lines. In braces stand

    bsh, bsw, rows, heads, bs1, b1h   a variable of that shape (SHAPES)
    any                               a variable of any of them; `same` is its shape again
    o, t:NAME                         the statement's result; a name of its own
    P:SHAPE, B:SHAPE                  a new parameter, a new buffer
    M:MODULE, A:VALUE                 a new module, a new attribute
    c, k                              a constant, a number of tokens
    L                                 a layer of the model
    O:CLASS                           an operator of torch's sample database with one of its samples (operators.py)
    block:NAME                        statements on the variable NAME, of shape (b, s, h), that end with `return`

and the same word with the same letter behind a slash ({bsh/a}) is the same again. Names at hand: x, mask, rotary, B, S, H.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """How a variable of shape (b, s, h), called v, is brought to this shape and back."""

    there: str
    back: str


SHAPES = {
    "bsh": Shape(there="{v}", back="{v}"),
    "bsw": Shape(there="torch.cat([{v}, {v}.sin()], -1)", back="{v}[..., :H] * {v}[..., H:].sigmoid()"),
    "rows": Shape(there="{v}.reshape(B * S, H)", back="{v}.view(B, S, H)"),
    "heads": Shape(there="{v}.view(B, S, 4, H // 4).transpose(1, 2)", back="{v}.transpose(1, 2).reshape(B, S, H)"),
    "bs1": Shape(there="{v}.mean(-1, keepdim=True)", back="{v} * x"),
    "b1h": Shape(there="{v}.mean(1, keepdim=True)", back="{v} + x"),
}
"""(b, s, h), (b, s, 2h), (b·s, h), (b, 4, s, h/4), (b, s, 1), (b, 1, h)."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """One habit of programs."""

    name: str
    weight: float
    shape: str
    """Of its result, or `same`."""
    text: str

    @property
    def nests(self) -> bool:
        """Whether it holds statements."""
        return "{block:" in self.text


def parsed(catalogue: str) -> dict[str, Statement]:
    """The statements of a catalogue by name, in its order."""
    found: dict[str, Statement] = {}
    lines = [line for line in catalogue.split("\n") if line.strip() and not line.startswith("#")]
    at = [number for number, line in enumerate(lines) if not line.startswith(" ")]
    for begin, end in zip(at, [*at[1:], len(lines)], strict=True):
        name, weight, shape = lines[begin].split(" | ")
        assert name not in found, name
        text = "\n".join(line[4:] for line in lines[begin + 1 : end])
        found[name] = Statement(name=name, weight=float(weight), shape=shape, text=text)
    return found
