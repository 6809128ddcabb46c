"""The rules for tokens are asked once for calls that look alike; calls that do not are never taken for those."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from memo.swap.recompute import prover
from memo.swap.recompute.axis.argument_axes import TokenDims
from memo.swap.recompute.axis.token_axis import MIXED, SAME, Axis
from memo.swap.recompute.prover import TokenAxisProver
from memo.swap.recompute.record.operator_log import Script

if TYPE_CHECKING:
    from collections.abc import Callable

    from memo.swap.recompute.axis.token_axis import Meaning

HIDDEN = torch.randn(1, 6, 6)
TABLE = torch.randn(1, 6, 6)
CALLS: dict[str, tuple[Callable[[], torch.Tensor], Meaning]] = {
    "of each token": (lambda: HIDDEN.softmax(-1), Axis(dim=1)),
    "over the tokens": (lambda: HIDDEN.softmax(-2), MIXED),
    "of another tensor": (lambda: TABLE.softmax(-2), SAME),
    "scaled alike": (lambda: HIDDEN * TABLE[:, :1], Axis(dim=1)),
    "scaled each by its own": (lambda: HIDDEN * TABLE, MIXED),
    "of another view": (lambda: HIDDEN.transpose(1, 2).softmax(-1), MIXED),
    "of another part": (lambda: HIDDEN[:, :, 2:].transpose(1, 2).softmax(-2), Axis(dim=2)),
    "pairs as complex numbers": (lambda: torch.view_as_complex(HIDDEN.view(1, 6, 3, 2)), Axis(dim=1)),
    "complex numbers as pairs": (lambda: torch.view_as_real(HIDDEN.to(torch.complex64)), Axis(dim=1)),
    "a part of each token": (lambda: HIDDEN.narrow(2, 1, 3), Axis(dim=1)),
    "a part of the tokens": (lambda: HIDDEN.narrow(1, 1, 3), MIXED),
    "joined with another": (lambda: torch.cat([HIDDEN, HIDDEN], 2), Axis(dim=1)),
    "joined with a second row of tokens": (lambda: torch.cat([HIDDEN, HIDDEN], 1), Axis(dim=1, outer=2)),
    "joined with rows of other tokens": (lambda: torch.cat([HIDDEN, HIDDEN.transpose(1, 2)], 1), MIXED),
    "one of two rows of tokens": (lambda: torch.cat([HIDDEN, HIDDEN], 1).split(6, 1)[1], Axis(dim=1)),
    "two rows of tokens, in thirds": (lambda: torch.cat([HIDDEN, HIDDEN], 1).split(4, 1)[1], MIXED),
    "rows of tokens, unlike ones": (lambda: torch.cat([HIDDEN, HIDDEN, HIDDEN], 1).split(12, 1)[0], MIXED),
    "joined with what is no token": (lambda: torch.cat([HIDDEN, TABLE], 2), MIXED),
}


def meanings(names: list[str]) -> dict[str, Meaning]:
    """Of the results of some calls, made one after the other in one forward."""
    dims = TokenDims(HIDDEN.size(1))
    with TokenAxisProver(HIDDEN, (HIDDEN,), {}, dims=dims, ends=(3, 3), script=Script([HIDDEN])) as prover:
        made = {name: CALLS[name][0]() for name in names}
    assert prover.reason is None
    return {name: prover.tokens.of(result) for name, result in made.items()}


@pytest.mark.parametrize("order", [1, -1])
def test_each_call_keeps_its_own_meaning_beside_those_that_look_like_it(
    order: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prover, "_MEANINGS", {})
    expected = {name: meaning for name, (_, meaning) in CALLS.items()}
    names = list(CALLS)[::order]
    assert meanings(names) == expected
    assert meanings(names) == expected, "the second time, when nothing is asked"


def test_the_rules_are_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prover, "_MEANINGS", {})
    asked = 0
    meaning_of = prover.meaning_of

    def count(call: prover.Call) -> Meaning:
        nonlocal asked
        asked += 1
        return meaning_of(call)

    monkeypatch.setattr(prover, "meaning_of", count)
    meanings(list(CALLS))
    first = asked
    meanings(list(CALLS))
    assert asked == first > 0


def test_what_was_seen_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prover, "_MEANINGS", {})
    monkeypatch.setattr(prover, "_MOST_MEANINGS", 3)
    assert meanings(list(CALLS)) == {name: meaning for name, (_, meaning) in CALLS.items()}
    assert len(prover._MEANINGS) <= 3
