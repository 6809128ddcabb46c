"""A forward that is held to an earlier one ends with all that a proof of its own would have given, wherever the two part."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from small_models import assert_equal, ids, plain, stack, train
from torch import nn
from torch.nn import functional as F
from torch.utils._mode_utils import no_dispatch

from memo.swap.answers import memoize
from memo.swap.aside import Aside
from memo.swap.following import Following
from memo.swap.noting import Noting
from memo.swap.precedent import Precedents, Storages
from memo.swap.script import Script
from memo.swap.tokendims import TokenDims
from memo.swap.tokens import TokenMap, geometry_of

if TYPE_CHECKING:
    from collections.abc import Callable

    import memo
    from memo.swap.precedent import Precedent

torch.manual_seed(0)
HIDDEN = torch.randn(1, 6, 8, requires_grad=True)
WEIGHT = torch.randn(8, 8, requires_grad=True)
TABLE, OTHER_TABLE = torch.randn(8), torch.randn(8)
EYE, ROW = torch.eye(3), torch.ones(3, 3)


CAST = nn.Parameter(torch.randn(8, dtype=torch.float64)).float()


class CompiledFunction(torch.autograd.Function):
    """What torch.compile calls its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)


class Another(torch.Tensor):
    """It might be more than its bytes."""


@memoize
def negated(x: torch.Tensor) -> torch.Tensor:
    return -x


COMPILED = CompiledFunction.apply(TABLE.requires_grad_())


def course(
    save: Callable[[torch.Tensor], None],
    *,
    scale: float = 2.0,
    over: tuple[int, ...] = (-1,),
    act: Any = torch.tanh,
    half: int = 0,
    table: torch.Tensor = TABLE,
    table_again: torch.Tensor = TABLE,
    times: float = 1.0,
    weight: torch.Tensor | None = None,
    marked: Callable[[torch.Tensor], torch.Tensor] = torch.neg,
    constant: float = 0.5,
    order: int = 1,
    dtype: torch.dtype = torch.float64,
    added: float = 1.0,
    mixed_in: bool = False,
    mask: torch.Tensor = EYE,
    dropped: float = 0.5,
    causal: bool = True,
    early: bool = True,
    saved: int = 0,
    saved_half: int = 0,
    disguise: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach,
    stop: bool = False,
    mean: bool = False,
) -> list[torch.Tensor]:
    """A forward with a choice in each kind of thing that it is compared by."""
    y = F.linear(HIDDEN, WEIGHT)
    halves = y.split(4, -1)
    save(halves[saved_half])
    a = halves[half] * scale
    if early:
        save(a)
    b = act(a) / a.abs().sum(over, keepdim=True)
    if not early:
        save(a)
    save((a, b)[saved])
    mean_of = b.mean(1 if mean else 2)
    c = torch.cat([a, b][::order], -1) * table
    c = marked(torch.add(c, table_again, alpha=times))
    c = F.layer_norm(c, (8,), weight)
    c = (c * torch.tensor(constant)).to(dtype).float()
    save(c)
    inside = c + 1
    inside.add_(added)
    if mixed_in:
        inside.mul_(inside.mean(1, keepdim=True))
    save(inside)
    where = mask.nonzero().float()
    save(where * 2)
    q = inside.unflatten(-1, (2, 4)).transpose(1, 2)
    made = F.scaled_dot_product_attention(q, q, q, is_causal=causal)
    save(made)
    with no_dispatch():
        disguised = disguise(made)
    save(disguised)
    if stop:
        return [y, a, b, c, inside, made]
    z = F.dropout(F.linear(made.transpose(1, 2).flatten(-2), WEIGHT.t()), dropped)
    save(z)
    return [y, a, b, c, inside, made, z, mean_of, F.linear(z, WEIGHT)]


def forward(precedent: Precedent | None, **choices: Any) -> Noting:
    script = Script([HIDDEN])
    noting = Noting(HIDDEN, (HIDDEN,), {}, dims=TokenDims(6), ends=(2, 4), script=script, precedent=precedent)

    def save(tensor: torch.Tensor) -> None:
        with Aside(noting):
            noting.save(tensor)

    with noting:
        noting.made = course(save, **choices)  # type: ignore[attr-defined]
    noting.ended()
    return noting


def knowledge(noting: Noting) -> dict[str, Any]:
    """All that a division and a recompute ask of a forward."""
    script = noting.script
    outside = [script.found(tensor.untyped_storage()) for tensor in (WEIGHT, TABLE, OTHER_TABLE, EYE, ROW)]
    results = noting.kept.results
    return {
        "reason": noting.reason,
        "mixes": noting.mixes,
        "slots": [(geometry_of(s.tensor), s.meaning, s.content, s.is_outside) for s in noting.kept.slots],
        "whole": [tensor.untyped_storage() in noting.kept.whole for tensor in noting.made],  # type: ignore[attr-defined]
        "answers": [
            (type(answer), answer.func, getattr(answer, "bits_per_token", None)) for answer in noting.kept.answers
        ],
        "results": [
            (r.axis, r.position, r.line, [(x.position, x.result and results.index(x.result)) for x in r.readers])
            for r in results
        ],
        "lines": script.lines,
        "given": script.given,
        "outside": [origin and (origin.made_by, origin.shift, origin.is_copy, origin.states) for origin in outside],
        "origins": [script.origin(tensor) for tensor in noting.made] if noting.precedent else None,  # type: ignore[attr-defined]
    }


OTHERWISE: dict[str, dict[str, Any]] = {
    "a number": {"scale": 3.0},
    "a number in a list": {"over": (-2,)},
    "more numbers in a list": {"over": (-2, -1)},
    "an operator": {"act": torch.sigmoid},
    "another part of what was made": {"half": 1},
    "another tensor from elsewhere": {"table": OTHER_TABLE},
    "another tensor from elsewhere, later": {"table_again": OTHER_TABLE},
    "a number by name": {"times": 2.0},
    "a marked function": {"marked": negated},
    "a tensor where there was none": {"weight": TABLE},
    "a cast parameter": {"table": CAST},
    "a tensor of another class": {"table_again": TABLE.detach().as_subclass(Another)},
    "what a compiled function made": {"table_again": COMPILED},
    "a constant": {"constant": 0.25},
    "tensors in a list": {"order": -1},
    "a type": {"dtype": torch.float16},
    "a number in place": {"added": 2.0},
    "tokens mixed in place": {"mixed_in": True},
    "the shape of what is made": {"mask": ROW},
    "attention": {"causal": False},
    "how much is dropped": {"dropped": 0.25},
    "when a tensor is saved": {"early": False},
    "which tensor is saved": {"saved": 1},
    "which part is saved": {"saved_half": 1},
    "of which class a saved tensor is": {"disguise": lambda tensor: tensor.as_subclass(Another)},
    "tokens mixed": {"mean": True},
    "fewer operators": {"stop": True},
}


@pytest.mark.parametrize("choices", OTHERWISE.values(), ids=OTHERWISE.keys())
@pytest.mark.parametrize("turned", [False, True], ids=["from the usual", "to the usual"])
def test_where_two_forwards_part_the_second_is_proven(choices: dict[str, Any], turned: bool) -> None:
    first, second = ({}, choices) if not turned else (choices, {})
    precedent = forward(None, **first).precedent
    held, anew = forward(precedent, **second), forward(None, **second)
    assert knowledge(held) == knowledge(anew)
    assert (held.precedent is None) == (anew.precedent is None)
    if held.precedent is not None:
        again = forward(held.precedent, **second)
        assert again.precedent is None, "what has been proven after the two had parted is a precedent as any other"
        assert knowledge(again) | {"origins": None} == knowledge(anew) | {"origins": None}


@pytest.mark.parametrize("choices", [{}, {"mean": True}], ids=["token by token", "tokens mixed"])
def test_a_forward_that_does_the_same_proves_nothing_and_knows_as_much(
    choices: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    precedent, anew = forward(None, **choices).precedent, forward(None, **choices)
    monkeypatch.setattr(Noting, "_anew", None)
    monkeypatch.setattr(Following, "leave", None)
    held = forward(precedent, **choices)
    assert precedent is not None
    assert knowledge(held) == knowledge(anew) | {"origins": None}
    assert held.precedent is None


def test_a_forward_with_a_marked_function_is_no_precedent() -> None:
    assert forward(None, marked=negated).precedent is None


def test_a_result_that_should_be_a_view_and_is_none_is_not_the_same() -> None:
    precedent = forward(None).precedent
    assert precedent is not None
    view, copy = WEIGHT.t(), torch.empty_strided((8, 8), (1, 8))
    assert geometry_of(view) == geometry_of(copy)
    for out, same in ((view, True), (copy, False)):
        storages = Storages([HIDDEN])
        following = Following(precedent, storages, Script([HIDDEN]))
        known = following.calls(torch.ops.aten.t.default, (WEIGHT,), {})
        assert known is not None
        assert following.made(known[0], out) is same
    following.leave(TokenMap(6))
    assert len(storages) == 1, "what the differing call has met is met anew"


def test_what_is_found_elsewhere_is_noted_as_it_is_now() -> None:
    precedent = forward(None).precedent
    with torch.no_grad():
        WEIGHT.add_(1.0)
    held = forward(precedent)
    found = held.script.found(WEIGHT.untyped_storage())
    assert found is not None
    assert found.states == {(WEIGHT._version, True)}


def test_what_has_mixed_tokens_before_two_forwards_part_is_known() -> None:
    precedent = forward(None, mean=True).precedent
    assert precedent is not None
    held, anew = (forward(known, mean=True, added=2.0) for known in (precedent, None))
    assert knowledge(held) == knowledge(anew)


def test_arguments_that_mean_something_else_are_not_held_to_it() -> None:
    precedent = forward(None).precedent
    assert precedent is not None
    script = Script([HIDDEN, HIDDEN])
    noting = Noting(HIDDEN, (HIDDEN, HIDDEN), {}, dims=TokenDims(6), ends=(2, 4), script=script, precedent=precedent)
    assert noting._following is None


def test_a_forward_that_was_broken_off_is_a_precedent_for_as_far_as_it_went() -> None:
    precedent = forward(None, stop=True).precedent
    held, anew = forward(precedent), forward(None)
    assert knowledge(held) == knowledge(anew)


class Alternates(nn.Module):
    """Does something else every other time, in ways that only its operators show."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.shift = nn.Parameter(torch.linspace(-1, 1, 64))
        self.choice: list[int] = [0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x)
        a, b = (y + self.shift).sin(), (y * self.shift).cos()
        y = a * 2 + b if self.choice[0] == 0 else b * 2 + a
        if self.choice[0] == 2:
            y = F.gelu(y)
        return x + self.down(torch.tanh(y))  # type: ignore[no-any-return]


@pytest.mark.parametrize("alpha", [0.25, (0.25, 0.5, 0.25)], ids=["tokens", "matmuls"])
def test_a_layer_that_does_something_else_every_time_has_the_same_gradients(
    offload: Callable[..., memo.Manager], alpha: Any
) -> None:
    def steps(model: Any, **kwargs: Any) -> Any:
        def forward(step: int) -> torch.Tensor:
            for layer in model.layers:
                layer.choice = [(0, 0, 1, 2, 1, 1, 0)[step]]
            return model(ids(step))  # type: ignore[no-any-return]

        return train(model, forward, steps=7, **kwargs)

    model = stack(make=Alternates)
    manager = offload(model, alpha=alpha)
    assert_equal(steps(model, manager=manager), steps(stack(make=Alternates)))
    use = manager.report().tokenwise
    assert use is not None
    assert not use.refused


def test_a_step_like_the_one_before_is_not_proven_again(
    offload: Callable[..., memo.Manager], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, expected = stack(), plain(steps=5)
    manager = offload(model, alpha=0.25)
    first = train(model, lambda step: model(ids(step)), manager, steps=2)
    monkeypatch.setattr(Noting, "_anew", None)
    later = train(model, lambda step: model(ids(step + 2)), manager, steps=3)
    assert_equal(first + later, expected)


def test_what_is_remembered_of_forwards_is_bounded() -> None:
    precedents = Precedents(2)
    known = forward(None).precedent
    assert known is not None
    for length in range(5):
        precedents[length] = known
    assert len(precedents) == 2
