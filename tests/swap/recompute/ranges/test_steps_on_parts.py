"""Steps that rows say may run on a part of the tokens do so, bit for bit: against the whole, over random shapes and parts.

The checker knows no rule. It runs a tape's steps on all tokens, then each one that is not said to mix them on a part of what
it reads, and compares with that part of what it made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from taped import Taped, record

from memo.swap.recompute.axis.token_axis import cut
from memo.swap.recompute.ranges.rows import TokenRows, token_layouts
from memo.swap.recompute.tape.log import Origin
from memo.swap.recompute.tape.tape import Step, Use, uses_in

LEAST = 24
"""Tokens; fewer are not divided."""
PRODUCTS = frozenset({"aten.mm", "aten.bmm"})
"""They may round in another way over fewer rows, which a plan's trial finds out."""


class Whole:
    """The storages of a tape while its steps run on all tokens."""

    def __init__(self, taped: Taped) -> None:
        self.tape, self.carried = taped.tape, taped.recorder.carried
        self.blocks: dict[int, torch.Tensor] = {}
        for number, (birth, *_) in enumerate(self.tape.storages):
            if birth is not Origin.MADE:
                self.blocks[number] = taped.recorder.tensors[number].detach()

    def tensor(self, value: int) -> torch.Tensor:
        storage, offset, size, stride, dtype = self.tape.geometry(value)
        return torch.empty(0, dtype=dtype).set_(self.blocks[storage].untyped_storage(), offset, size, stride)

    def given(self, value: Any, show: Callable[[Use], torch.Tensor]) -> Any:
        """Arguments with tensors in them."""
        if isinstance(value, Use):
            return show(value)
        if isinstance(value, (list, tuple)):
            return [self.given(item, show) for item in value]
        return self.carried[value.position] if type(value).__name__ == "Carried" else value

    def run(self, step: Step, args: Sequence[Any], show: Callable[[Use], torch.Tensor]) -> Any:
        named = {name: self.given(value, show) for name, value in step.kwargs.items()}
        return step.operator.func(*self.given(args, show), **named)

    def keep(self, step: Step, out: Any) -> None:
        for use, tensor in zip(uses_in(step.out), out if isinstance(out, (tuple, list)) else [out], strict=True):
            self.blocks[self.tape.geometry(use.value)[0]] = tensor


def check(taped: Taped, rows: TokenRows, first: int, stop: int) -> list[str]:
    """Runs each step on all tokens and on a part; returns the names of those that ran on a part of more than a view."""
    whole, ran = Whole(taped), []

    def part(use: Use) -> torch.Tensor:
        tensor, axis = whole.tensor(use.value), rows.axes.get((use.value, use.content))
        is_divided = axis is not None and use.content in rows.rows
        return cut(tensor, axis, first, stop, rows.tokens).clone() if axis is not None and is_divided else tensor

    for step in taped.tape.steps:
        uses = uses_in(step.out)
        divides = step.makes and step.number not in rows.mixes and any(content in rows.rows for content in step.makes)
        again = None
        if divides:
            again = whole.run(step, rows.args_of(step, stop - first, first), part)
        whole.keep(step, whole.run(step, step.args, lambda use: whole.tensor(use.value)))
        if divides:
            for use, made in zip(uses, again if isinstance(again, (tuple, list)) else [again], strict=True):
                want = cut(whole.tensor(use.value), rows.axes[use.value, use.content], first, stop, rows.tokens)
                assert made.shape == want.shape, step.name
                assert made.dtype == want.dtype
                if step.name in PRODUCTS:
                    torch.testing.assert_close(made, want)
                    continue
                assert torch.equal(made.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8)), step.name
            ran.append(step.name)
    return ran


Case = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def places(x: torch.Tensor, dim: int, most: int, count: int) -> torch.Tensor:
    """Numbers below `most` along `dim`, other ones for each token, as a router's."""
    return (x.narrow(dim, 0, count).detach() * 1000).long().abs() % most


CASES: dict[str, tuple[str, Case]] = {
    "tril": ("aten.tril", lambda x, k: (x @ k).tril()),
    "tril of a diagonal": ("aten.tril", lambda x, k: (x @ k).tril(3)),
    "triu of a diagonal": ("aten.triu", lambda x, k: (x @ k).triu(-5)),
    "tril of pairs": ("aten.tril", lambda x, k: (x.sin() @ x.cos().mT).tril(1)),
    "triu in place": ("aten.triu_", lambda x, k: (x @ k).triu_(2)),
    "masked_fill": ("aten.masked_fill", lambda x, k: x.masked_fill(x > 0, 0.5)),
    "masked_fill of a row": ("aten.masked_fill", lambda x, k: x.masked_fill(k.new_ones(x.size(-1)) > 2, 0.5)),
    "masked_fill in place": ("aten.masked_fill_", lambda x, k: x.exp().masked_fill_(x.mean(-1, keepdim=True) > 0, 7.0)),
    "floor_divide": ("aten.floor_divide", lambda x, k: places(x, -1, 1000, 4) // 7 + 0.0),
    "index_select": ("aten.index_select", lambda x, k: x.index_select(-1, torch.tensor([3, 0, 1, 1]))),
    "index_select of keys": (
        "aten.index_select",
        lambda x, k: (x.sin() @ x.cos().mT).index_select(-1, torch.arange(x.size(-2) - 1, -1, -1)),
    ),
    "gather": ("aten.gather", lambda x, k: x.gather(-1, places(x, -1, x.size(-1), 3))),
    "scatter of a number": ("aten.scatter", lambda x, k: x.scatter(-1, places(x, -1, x.size(-1), 3), -1.0)),
    "scatter in place": ("aten.scatter_", lambda x, k: x.exp().scatter_(-1, places(x, -1, x.size(-1), 5), -1.0)),
    "max": ("aten.max", lambda x, k: x.max(-1).values),
    "max with indices": ("aten.max", lambda x, k: x.max(-1, keepdim=True).indices + 0.0),
    "min": ("aten.min", lambda x, k: x.min(-1, keepdim=True).values),
    "amin": ("aten.amin", lambda x, k: x.amin(-1)),
    "argmin": ("aten.argmin", lambda x, k: x.argmin(-1) + 0.0),
    "logsumexp": ("aten.logsumexp", lambda x, k: x.logsumexp(-1)),
    "any": ("aten.any", lambda x, k: (x > 1).any(-1) + 0.0),
    "all": ("aten.all", lambda x, k: (x > -1).all(-1, keepdim=True) + 0.0),
    "pad of features": ("aten.constant_pad_nd", lambda x, k: torch.nn.functional.pad(x, (1, 2), value=3.0)),
    "pad of what is before": ("aten.constant_pad_nd", lambda x, k: torch.nn.functional.pad(x, (0, 0, 0, 0, 1, 0))),
    "repeat": ("aten.repeat", lambda x, k: x.repeat(1, 1, 3)),
    "repeat into new dimensions": ("aten.repeat", lambda x, k: x.repeat(2, 1, 1, 2)),
}  # fmt: skip
"""Operator that is to run on a part -> a function of hidden states and of a matrix (features, some columns)."""


@pytest.mark.parametrize("case", CASES)
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_a_step_on_a_part_has_the_bits_of_the_whole(case: str, data: st.DataObject) -> None:
    name, function = CASES[case]
    batch, features = data.draw(st.integers(1, 3)), data.draw(st.integers(5, 9))
    tokens = data.draw(st.integers(LEAST, 40))
    first = data.draw(st.integers(0, tokens - 1))
    stop = data.draw(st.integers(first + 1, tokens))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 99)))
    x = torch.randn(batch, tokens, features, generator=generator).round(decimals=2).requires_grad_()
    taped = record(function, x, torch.randn(features, features + 2, generator=generator))
    ran = [check(taped, rows, first, stop) for rows in token_layouts(taped.tape, taped.recorder.carried)]
    assert any(name in names for names in ran), f"{name} runs on no part"


REFUSED: dict[str, Case] = {
    "tril of tokens in columns": lambda x, k: x.mT.contiguous().tril(),
    "masked_fill over keys and queries alike": lambda x, k: x.cumsum(1).masked_fill(x > 0, 0.5),
    "index_select of tokens": lambda x, k: x.index_select(1, torch.arange(x.size(1) - 1, -1, -1)),
    "gather of tokens": lambda x, k: x.gather(1, places(x, 1, x.size(1), x.size(1))),
    "scatter of several numbers": lambda x, k: x.scatter(-1, places(x, -1, x.size(-1), 3), x.cos()),
    "scatter that adds": lambda x, k: x.scatter(-1, places(x, -1, x.size(-1), 3), 2.0, reduce="add"),
    "scatter to tokens": lambda x, k: x.scatter(1, places(x, 1, x.size(1), x.size(1)), -1.0),
    "max of tokens": lambda x, k: x.max(1, keepdim=True).values.expand_as(x) + x,
    "max of all": lambda x, k: x.max() + x,
    "pad of tokens": lambda x, k: torch.nn.functional.pad(x, (0, 0, 1, 0))[:, :-1],
    "pad that cuts": lambda x, k: torch.nn.functional.pad(x, (0, 0, 1, -1)),
    "repeat of tokens": lambda x, k: x.repeat(1, 2, 1),
}
"""Of each the last but few steps mix tokens."""


@pytest.mark.parametrize("case", REFUSED)
@given(batch=st.integers(1, 3), tokens=st.integers(LEAST, 40), features=st.integers(5, 9), first=st.integers(0, 23))
@settings(max_examples=10, deadline=None)
def test_what_is_not_proven_never_runs_on_a_part(case: str, batch: int, tokens: int, features: int, first: int) -> None:
    x = torch.randn(batch, tokens, features).round(decimals=2).requires_grad_()
    taped = record(REFUSED[case], x, torch.randn(features, features + 2))
    for rows in token_layouts(taped.tape, taped.recorder.carried):
        check(taped, rows, first, tokens)
        if rows.tokens == tokens and tokens not in (batch, features):
            assert rows.mixes, "some step mixes tokens"


@pytest.mark.parametrize("dim", [0, 1, 2])
@given(tokens=st.integers(LEAST, 40), first=st.integers(0, 23), streams=st.integers(2, 4), batch=st.integers(1, 3))
@settings(max_examples=15, deadline=None)
def test_tokens_are_found_in_each_dimension_of_four(
    dim: int, tokens: int, first: int, streams: int, batch: int
) -> None:
    """Hidden states of several streams: joined with what is before the tokens, with what is behind, or with both."""
    weight = torch.nn.Parameter(torch.randn(8, 8))
    size = [batch, streams]
    size.insert(dim, tokens)
    x = torch.randn(*size, 8).requires_grad_()

    def layer(x: torch.Tensor) -> torch.Tensor:
        mixed = x.softmax(-1).flatten(0, 2).sin().unflatten(0, size)
        pairs = mixed.flatten(0, 1).cos().unflatten(0, size[:2]) + mixed.flatten(1, 2).exp().unflatten(1, size[1:])
        return (pairs.view(-1, 8) @ weight).tanh().unflatten(0, size).sum(0 if dim else 1)

    taped = record(layer, x)
    found = [rows for rows in token_layouts(taped.tape, taped.recorder.carried) if rows.tokens == tokens]
    assert found
    for rows in found:
        assert not rows.mixes
        ran = check(taped, rows, first, tokens)
        assert {"aten.sin", "aten.cos", "aten.exp", "aten.tanh", "aten.sum"} <= set(ran)
