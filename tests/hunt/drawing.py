"""Draws programs: the same one from the same seed."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence

import torch

from tests.hunt.layer_statements import LAYER_STATEMENTS
from tests.hunt.model_statements import MODEL_STATEMENTS, WIRINGS
from tests.hunt.names import TOKENS
from tests.hunt.operators import MOST_SAMPLES, sampled_names
from tests.hunt.program import Body, Line, Program, Step
from tests.hunt.statements import SHAPES, Statement
from tests.hunt.step_statements import STEPS

MOST_LAYERS = 4
MOST_STATEMENTS = 9
"""Of a layer, but those in blocks."""
_CALLS = [name for name, statement in MODEL_STATEMENTS.items() if "{L" in statement.text]
_BETWEEN = [name for name in MODEL_STATEMENTS if name not in _CALLS]
_ENDINGS = {
    "return <O>": 16,
    "return <O>, <V>": 2,
    "return dict(hidden=<O>, rest=[<V>, (<V>, 3)], name='text')": 1,
    "return [<O>, None, <V>]": 1,
}


def catalogued() -> list[str]:
    """Names of all statements as `Program.statements` has them."""
    return [*LAYER_STATEMENTS, *MODEL_STATEMENTS, *WIRINGS, *(f"step: {name}" for name in STEPS)]


class _Writer:
    """Draws statements from one catalogue. Its numbers of variables and attributes go on from body to body."""

    def __init__(self, draws: random.Random, catalogue: Mapping[str, Statement]) -> None:
        self._draws = draws
        self._catalogue = catalogue
        self._number = 0

    def draw(self, names: Sequence[str]) -> str:
        """One of the statements called so, by their weights."""
        return self._draws.choices(names, [self._catalogue[name].weight for name in names])[0]

    def block(self, start: str, names: Sequence[str], depth: int = 0, ending: str = "return <R>") -> Body:
        """The statements of these names, on the variable `start` of shape (b, s, h)."""
        pool = [(start, "bsh")]
        lines = [line for name in names for line in self._lines(self._catalogue[name], pool, depth)]
        recent = pool[-self._draws.choice((1, 2, 3)) :]
        for _ in range(ending.count("<V>")):
            ending = ending.replace("<V>", self._draws.choice(pool)[0], 1)
        return Body(
            lines=tuple(lines),
            results=tuple(f"({SHAPES[kind].back.format(v=name)})" for name, kind in recent),
            ending=ending,
        )

    def wiring(self, name: str) -> Line:
        """One line of a model's construction."""
        pool: list[tuple[str, str]] = []
        return self._lines(self._catalogue[name], pool, 1)[-1]

    def _constant(self) -> str:
        return f"{self._draws.uniform(0.2, 0.9):.2f}"

    def _name(self, letter: str) -> str:
        self._number += 1
        return f"{letter}{self._number}"

    def _lines(self, statement: Statement, pool: list[tuple[str, str]], depth: int) -> list[Line]:
        kind, text = statement.shape, statement.text
        known: dict[str, str] = {}
        before: list[Line] = []
        declared: list[str] = []
        blocks: list[Body] = []

        def variable(wanted: str) -> str:
            nonlocal kind
            fitting = [(name, had) for name, had in pool if wanted in ("any", had)]
            if not fitting:
                source = self._draws.choice([name for name, had in pool if had == "bsh"])
                name = self._name("v")
                made = f"{name} = {SHAPES[wanted].there.format(v=source)}"
                before.append(Line(name=f"shape {wanted}", text=made, plain=f"{name} = x"))
                return name
            name, had = self._draws.choice(fitting[-4:])
            if kind == "same" and wanted == "any":
                kind = had
            return name

        def attribute(made: str) -> str:
            name = self._name("m")
            declared.append(f"self.{name} = {made}")
            return f"self.{name}"

        def value(word: str) -> str:
            head, _, rest = word.partition(":")
            head, _, tag = head.partition("/")
            if word in known:
                return known[word]
            if head in SHAPES or head == "any":
                found = variable(head)
            elif head in ("o", "t"):
                found = self._name("v")
            elif head == "P":
                found = attribute(f"nn.Parameter(torch.randn({rest}) * 0.3)")
            elif head == "B":
                found = self._name("b")
                declared.append(f"self.register_buffer('{found}', torch.zeros({rest}))")
                found = f"self.{found}"
            elif head in ("M", "A"):
                found = attribute(rest)
            elif head == "O":
                name, variant = self._draws.choice(sampled_names())
                number = self._draws.randrange(MOST_SAMPLES)
                found = attribute(f"Sampled({name!r}, {variant!r}, {number}{rest})")
            elif head == "L":
                found = f"<L{self._draws.randrange(12)}>"  # 12: each number of layers divides it
            elif head == "c":
                found = self._constant()
            elif head == "k":
                found = str(self._draws.randint(4, 12))
            else:
                raise AssertionError(word)
            if tag or head in ("o", "t"):
                known[word] = found
            return found

        text = re.sub(r"\{t:(\w+)\}", lambda match: value(f"t:{match[1]}"), text)
        for start in re.findall(r"\{block:(\w+)\}", text):
            fitting = [name for name, one in self._catalogue.items() if not (depth and one.nests)]
            inner = [self.draw(fitting) for _ in range(self._draws.randint(1, 4))]
            text = text.replace(f"{{block:{start}}}", f"<{len(blocks)}>")
            blocks.append(self.block(start, inner, depth + 1, "return (<R>).tanh()"))
        # modules and attributes may hold braces of their own
        text = re.sub(r"\{A:(\{.*?\}|[^{}]*)\}", lambda match: value(f"A:{match[1]}"), text)
        text = re.sub(r"\{([A-Za-z0-9]+(?:[:/][^{}]*)?)\}", lambda match: value(match[1]), text)
        plain = ""
        if "o" in known:
            pool.append((known["o"], kind))
            plain = f"{known['o']} = {SHAPES[kind].there.format(v='x')}"
        line = Line(name=statement.name, text=text, plain=plain, declared=tuple(declared), blocks=tuple(blocks))
        return [*before, line]


def drawn(seed: int, *, statements: int = MOST_STATEMENTS) -> Program:
    """The program of this seed; its layers have up to so many statements."""
    draws = random.Random(seed)
    inside = _Writer(draws, LAYER_STATEMENTS)
    kinds = tuple(_layer(draws, inside, statements) for _ in range(draws.choice((1, 1, 1, 2))))
    number = draws.randint(2, MOST_LAYERS)
    layers = tuple(draws.randrange(len(kinds)) for _ in range(number))
    outside = _Writer(draws, MODEL_STATEMENTS)
    names: list[str] = []
    for _ in range(number):
        names.append(outside.draw(_CALLS))
        if draws.random() < 0.4:
            names.append(outside.draw(_BETWEEN))
    wires = _Writer(draws, WIRINGS)
    wiring = tuple(wires.wiring(wires.draw([*WIRINGS])) for _ in range(draws.choice((0, 0, 0, 1, 1, 2))))
    attached = draws.random() < 0.2
    # A checkpoint around a model that memo is attached to saves nothing: memo's hooks are the inner ones.
    fitting = [name for name in STEPS if not (attached and name == "checkpointed")]
    chosen = draws.choices(fitting, [STEPS[name].weight for name in fitting], k=3)
    return Program(
        seed=seed,
        kinds=kinds,
        layers=layers,
        model=outside.block("x", names),
        wiring=wiring,
        steps=tuple(_step(draws, name) for name in chosen),
        dtype=draws.choice((torch.float32, torch.float32, torch.float32, torch.bfloat16)),
        attached=attached,
    )


def _layer(draws: random.Random, writer: _Writer, statements: int) -> Body:
    names = [writer.draw([*LAYER_STATEMENTS]) for _ in range(draws.randint(3, max(3, statements)))]
    ending = draws.choices([*_ENDINGS], [*_ENDINGS.values()])[0]
    return writer.block("x", names, ending=ending.replace("<O>", _joined(draws)))


def _joined(draws: random.Random) -> str:
    return f"x + {draws.uniform(0.2, 0.9):.2f} * F.layer_norm(<R>, (H,))"


def _step(draws: random.Random, name: str) -> Step:
    return Step(name=name, text=STEPS[name].text, tokens=draws.choice((TOKENS, TOKENS, TOKENS - 8)))


def with_only(name: str) -> Program:
    """A plain program with one statement of this name in it, of any catalogue."""
    draws = random.Random(7)
    inside, outside = _Writer(draws, LAYER_STATEMENTS), _Writer(draws, MODEL_STATEMENTS)
    wires = _Writer(draws, WIRINGS)
    body = ["linear", name, "tanh"] if name in LAYER_STATEMENTS else ["linear", "gelu", "down"]
    calls = ["call", name if name in MODEL_STATEMENTS else "call", "call"]
    step = name if name in STEPS else "plain"
    return Program(
        seed=7,
        kinds=(inside.block("x", body, ending=f"return {_joined(draws)}"),),
        layers=(0, 0, 0),
        model=outside.block("x", calls),
        wiring=(wires.wiring(name),) if name in WIRINGS else (),
        steps=(_step(draws, step), _step(draws, "plain"), _step(draws, step)),
        dtype=torch.float32,
        attached=False,
    )
