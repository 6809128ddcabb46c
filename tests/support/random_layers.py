"""Random layers over torch's operators, as text, and three steps of a model of them with and without memo.

A seed gives a program: a class `Layer` whose forward has the shape of its input, of statements that are drawn from
random_statements.py. What programs call beside torch is here: functions and operators of one's own, kernels that torch's
dispatcher does not see, hooks.
"""

from __future__ import annotations

import dataclasses
import random
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import torch
from random_statements import SHAPES, STATEMENTS, Statement
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint  # noqa: F401 (programs use it)

import memo
from memo.errors import ModifiedAfterSave
from memo.swap import Level

__all__ = ["POINTS", "Outcome", "Program", "compare", "program"]

HIDDEN, TOKENS, BATCH, LAYERS, STEPS = 16, 32, 2, 3, 3

POINTS: dict[str, Any] = {
    "1": 1.0,
    "0.5": 0.5,
    "0": 0.0,
    "matmuls": (0.0, 1.0, 0.0),
    "thirds": (0.25, 0.25, 0.5),
    "input": Level.SAVE_INPUT,
}
"""Name of a setting to its alpha or level."""
KINDS = (torch.float32, torch.bfloat16)


class Scaled(torch.autograd.Function):
    """tanh(exp(tanh(x)) · w), with what its backward needs saved."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        inner = x.tanh().exp()
        out = (inner * weight).tanh()
        ctx.save_for_backward(x, inner, out, weight)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, inner, out, weight = ctx.saved_tensors
        above = grad * (1 - out * out)
        return above * weight * inner * (1 - x.tanh() ** 2), (above * inner).sum((0, 1))


class DoubledInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2


class Parted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        half = x.size(-1) // 2
        left, right = x[..., :half].sin(), x[..., half:].contiguous() * 1
        ctx.save_for_backward(x, right)
        return left, right

    @staticmethod
    def backward(ctx: Any, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        x, kept = ctx.saved_tensors
        return torch.cat([left * x[..., : left.size(-1)].cos(), right + 0 * kept], -1)


def fill(out: torch.Tensor, x: torch.Tensor) -> None:
    """Writes tanh(x) + 0.5 where torch's dispatcher does not see it."""
    value = numpy.tanh(x.detach().float().numpy()) + numpy.float32(0.5)
    if out.dtype is torch.bfloat16:
        out.detach().view(torch.int16).numpy()[...] = (value.astype(numpy.float32).view(numpy.uint32) >> 16).astype(
            numpy.int16
        )
    else:
        out.detach().numpy()[...] = value


class Opaque(torch.autograd.Function):
    """tanh(x) + 0.5 by a kernel that the dispatcher does not see, into memory that `make` gives."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, make: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        out = make(x)
        fill(out, x)
        ctx.save_for_backward(out)
        return out.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (out,) = ctx.saved_tensors
        return grad * (1 - (out - 0.5).square()), None


def _halve(x: torch.Tensor) -> None:
    x.mul_(0.5)


_LIBRARY = torch.library.Library("memo_random", "FRAGMENT")
_LIBRARY.define("smooth(Tensor x) -> Tensor")
_LIBRARY.define("halve(Tensor(a!) x) -> ()")
_LIBRARY.define("carried(Tensor x) -> Tensor")
_LIBRARY.impl("halve", _halve, "CPU")
_LIBRARY.impl("smooth", lambda x: torch.atan(x), "CPU")
_LIBRARY.impl("carried", lambda x: x.cumsum(1).div(x.size(1)), "CPU")


def _save_input(ctx: Any, inputs: tuple[torch.Tensor], output: torch.Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward_of_smooth(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
    (x,) = ctx.saved_tensors
    return grad / (1 + x * x)


torch.library.register_autograd("memo_random::smooth", _backward_of_smooth, setup_context=_save_input, lib=_LIBRARY)
torch.library.register_autograd(
    "memo_random::carried",
    lambda ctx, grad: grad.flip(1).cumsum(1).flip(1).div(grad.size(1)),
    lib=_LIBRARY,
)


def hooked(module: nn.Module, factor: float) -> nn.Module:
    """With a forward hook that changes the output."""
    module.register_forward_hook(lambda _module, _args, out: out * factor)
    return module


def counted(module: nn.Module) -> nn.Module:
    """With a forward hook that counts calls."""
    module.calls = 0  # type: ignore[assignment]

    def count(inner: Any, _args: Any, _out: Any) -> None:
        inner.calls += 1

    module.register_forward_hook(count)
    return module


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """One random layer."""

    seed: int
    text: str
    statements: tuple[str, ...]
    """Names of what its statements were drawn from."""

    def model(self, kind: torch.dtype) -> nn.Module:
        """A model of a few such layers with the same weights each time."""
        names: dict[str, Any] = {**globals(), "H": HIDDEN, "TABLE": torch.linspace(0.5, 1.5, HIDDEN).to(kind)}
        exec(compile(self.text, f"<random layer {self.seed}>", "exec"), names)
        torch.manual_seed(self.seed)
        return Stack(names["Layer"]).to(kind)


class Stack(nn.Module):
    """Layers on a learned offset of the step's input."""

    def __init__(self, make: Callable[[], nn.Module]) -> None:
        super().__init__()
        self.start = nn.Parameter(torch.randn(HIDDEN) / 2)
        self.layers = nn.ModuleList([make() for _ in range(LAYERS)])

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        x = given + self.start
        tokens = x.size(1)
        mask = torch.ones(tokens, tokens, dtype=torch.bool).tril()
        angles = torch.arange(tokens, dtype=torch.float32).view(-1, 1) / torch.arange(1, HIDDEN // 4 + 1)
        rotary = (angles.cos().to(x.dtype), angles.sin().to(x.dtype))
        beside = x.new_zeros(())
        for layer in self.layers:
            x = layer(x, mask, rotary=rotary)
            if isinstance(x, tuple):
                x, more = x
                beside = beside + more.mean()
            if layer.aside is not None:
                beside = beside + layer.aside.square().mean()
                layer.aside = None
        out = F.layer_norm(x.float(), (HIDDEN,))
        return (out * torch.linspace(-1, 1, out.numel()).view(out.shape)).mean() + out.sin().mean() + beside.float()


class _Writer:
    """Draws statements and keeps what they declare."""

    def __init__(self, draws: random.Random) -> None:
        self._draws = draws
        self._number = 0
        self.declared: list[str] = []
        self.statements: list[str] = []

    def block(self, start: str, statements: int, depth: int, names: Sequence[str] | None = None) -> list[str]:
        """Statements on the variable `start` of shape (b, s, h) that end with a `return` of that shape."""
        pool = [(start, "bsh")]
        lines: list[str] = []
        for name in names or [self._draw(depth) for _ in range(statements)]:
            self.statements.append(name)
            lines += self._statement(STATEMENTS[name], pool, depth)
        recent = pool[-self._draws.choice((1, 2, 3)) :]
        result = " + ".join(f"({SHAPES[kind].back.format(v=name)})" for name, kind in recent)
        if depth:
            return [*lines, f"return ({result}).tanh()"]
        return [*lines, *self._ending(result, pool)]

    def _ending(self, result: str, pool: list[tuple[str, str]]) -> list[str]:
        out = f"x + {self._constant()} * F.layer_norm({result}, (H,))"
        if self._draws.random() < 0.1:
            return [f"return {out}, {self._draws.choice(pool)[0]}"]
        return [f"return {out}"]

    def _draw(self, depth: int) -> str:
        fitting = [statement for statement in STATEMENTS.values() if not (depth and statement.nests)]
        return self._draws.choices(fitting, [statement.weight for statement in fitting])[0].name

    def _constant(self) -> str:
        return f"{self._draws.uniform(0.2, 0.9):.2f}"

    def _name(self, letter: str) -> str:
        self._number += 1
        return f"{letter}{self._number}"

    def _statement(self, statement: Statement, pool: list[tuple[str, str]], depth: int) -> list[str]:
        kind, text = statement.shape, statement.text
        known: dict[str, str] = {}
        before: list[str] = []

        def variable(wanted: str) -> str:
            nonlocal kind
            fitting = [(name, had) for name, had in pool if wanted in ("any", had)]
            if not fitting:
                source = self._draws.choice([name for name, had in pool if had == "bsh"])
                name = self._name("v")
                before.append(f"{name} = {SHAPES[wanted].there.format(v=source)}")
                return name
            name, had = self._draws.choice(fitting[-4:])
            if kind == "same" and wanted == "any":
                kind = had
            return name

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
                found = self._declare(f"nn.Parameter(torch.randn({rest}) * 0.3)")
            elif head == "B":
                found = self._declare_buffer(rest)
            elif head in ("M", "A"):
                found = self._declare(rest)
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
            lines = self.block(start, self._draws.randint(1, 4), depth + 1)
            text = text.replace(f"{{block:{start}}}", "\n    ".join(lines))
        # modules and attributes may hold braces of their own
        text = re.sub(r"\{A:(\{.*?\}|[^{}]*)\}", lambda match: value(f"A:{match[1]}"), text)
        text = re.sub(r"\{([A-Za-z0-9]+(?:[:/][^{}]*)?)\}", lambda match: value(match[1]), text)
        pool.append((known["o"], kind))
        return [*before, *text.split("\n")]

    def _declare(self, made: str) -> str:
        name = self._name("m")
        self.declared.append(f"self.{name} = {made}")
        return f"self.{name}"

    def _declare_buffer(self, shape: str) -> str:
        name = self._name("b")
        self.declared.append(f"self.register_buffer('{name}', torch.zeros({shape}))")
        return f"self.{name}"


def program(seed: int, *, statements: int = 10, only: str | None = None) -> Program:
    """The program of this seed, of up to so many statements; of the one called `only` after a product, if it is given."""
    draws = random.Random(seed)
    writer = _Writer(draws)
    names = None if only is None else ["linear", only, "tanh"]
    body = writer.block("x", draws.randint(3, statements), 0, names)
    lines = [
        "class Layer(nn.Module):",
        "    def __init__(self):",
        "        super().__init__()",
        "        self.calls, self.aside = 0, None",
        *(f"        {line}" for line in writer.declared),
        "",
        "    def forward(self, x, mask, rotary):",
        "        B, S = x.shape[:2]",
        *(f"        {line}" for line in body),
    ]
    return Program(seed=seed, text="\n".join(lines) + "\n", statements=tuple(writer.statements))


@dataclasses.dataclass(slots=True, kw_only=True)
class Outcome:
    """A program compared with and without memo."""

    discarded: str | None = None
    """Why nothing was compared: torch alone raises, is not finite, or does not repeat itself."""
    failures: list[str] = dataclasses.field(default_factory=list)
    """Point and what was wrong there."""
    compared: int = 0
    """Points compared."""
    moved_bytes: dict[str, int] = dataclasses.field(default_factory=dict)
    recomputed_bytes: dict[str, int] = dataclasses.field(default_factory=dict)
    refused: list[str] = dataclasses.field(default_factory=list)
    """Reasons of layers that moved whole at alpha 0."""


def compare(made: Program, points: dict[str, Any] | None = None, kinds: tuple[torch.dtype, ...] = KINDS) -> Outcome:
    """Three steps of the program's model, plain and at each point, bit for bit."""
    found = Outcome()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for kind in kinds:
            if reason := _compare(made, POINTS if points is None else points, kind, found):
                found.discarded = found.discarded or f"{kind}: {reason}"
    return found


def _compare(made: Program, points: dict[str, Any], kind: torch.dtype, found: Outcome) -> str | None:
    raised = None
    want: dict[str, Any] = {}
    try:
        want = _train(made.model(kind), kind)
    except Exception as error:
        raised = f"{type(error).__name__}: {str(error).splitlines()[0][:100]}"
        if "modified by an inplace operation" not in str(error):
            return raised
    else:
        if not all(torch.isfinite(value).all() for value in want.values() if isinstance(value, torch.Tensor)):
            return "not finite"
        if _unlike(_train(made.model(kind), kind), want):
            return "does not repeat itself"
    for name, point in points.items():
        at = f"{name}, {str(kind).removeprefix('torch.')}"
        model = made.model(kind)
        manager = memo.offload(model, alpha=1.0 if isinstance(point, Level) else point, host="64MiB", min_bytes=1)
        try:
            if isinstance(point, Level):
                manager.choose_levels(dict.fromkeys(range(LAYERS), point))
            got = _train(model, kind, manager)
        except ModifiedAfterSave as error:
            if raised is None:
                found.failures.append(f"{at}: {error}")
        except Exception as error:
            if raised is None:
                found.failures.append(f"{at}: {type(error).__name__}: {str(error)[:300]}")
        else:
            if raised is not None:
                found.failures.append(f"{at}: does not raise where torch does: {raised}")
            elif unlike := _unlike(got, want):
                found.failures.append(f"{at}: differs in {', '.join(unlike[:4])}{' ...' if len(unlike) > 4 else ''}")
        finally:
            manager.close()
        found.compared += 1
        stats = manager.stats
        found.moved_bytes[at] = stats.bytes_host + stats.bytes_disk
        found.recomputed_bytes[at] = stats.bytes_recomputed
        if name == "0":
            found.refused += getattr(manager.report().tokenwise, "refused", {}).values()
    return raised


def _train(model: nn.Module, kind: torch.dtype, manager: memo.Manager | None = None) -> dict[str, Any]:
    """Losses, gradients, buffers, and what the layers keep in Python, by name."""
    got: dict[str, Any] = {}
    for step in range(STEPS):
        tokens = TOKENS if step < 2 else TOKENS - 8
        given = torch.randn(BATCH, tokens, HIDDEN, generator=torch.Generator().manual_seed(step)).to(kind)
        given.requires_grad_()
        torch.manual_seed(step)
        random.seed(step)
        numpy.random.seed(step)
        if manager is None:
            loss = model(given)
        else:
            with manager:
                loss = model(given)
        loss.backward()
        got[f"loss of step {step}"] = loss.detach()
        got[f"gradient of the input, step {step}"] = given.grad
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                got[f"gradient of {name}, step {step}"] = parameter.grad
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-0.01)
                parameter.grad = None
    got.update(model.named_buffers())
    for name, layer in model.named_modules():
        for attribute, value in vars(layer).items():
            if (attribute.startswith("m") and isinstance(value, list | dict)) or attribute == "calls":
                got[f"{name}.{attribute}"] = value
    got["random numbers"] = torch.get_rng_state()
    got["Python's and NumPy's"] = (random.getstate(), str(numpy.random.get_state()))
    return got


def _unlike(got: dict[str, Any], want: dict[str, Any]) -> list[str]:
    return [name for name in {**want, **got} if not _same(got.get(name), want.get(name))]


def _same(ours: Any, theirs: Any) -> bool:
    if isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor):
        return torch.equal(ours, theirs)
    if isinstance(ours, list) and isinstance(theirs, list):
        return len(ours) == len(theirs) and all(map(_same, ours, theirs))
    return not isinstance(ours, torch.Tensor) and not isinstance(theirs, torch.Tensor) and bool(ours == theirs)
