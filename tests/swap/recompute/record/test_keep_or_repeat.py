"""Results that a recompute at the middle level is given, those that it leaves out, and those that it computes again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from offload_models import refused
from small_models import assert_equal, ids, stack, train
from torch import nn

import memo
from memo.errors import SwapError
from memo.swap.recompute.axis.token_axis import Axis
from memo.swap.recompute.record.keep_or_repeat import Treatment, treatments
from memo.swap.recompute.record.kept_results import Reader, Result
from memo.swap.recompute.record.token_local_functions import token_local
from memo.swap.token_levels import Level

KEPT, OMITTED, REPEATED = Treatment.KEPT, Treatment.OMITTED, Treatment.REPEATED
TOKENS = 8


def some_function() -> None: ...


class Forward:
    """A forward as far as it concerns results; everything is read at the place where it is said."""

    def __init__(self) -> None:
        self.results: list[Result] = []

    def product(self, *given: Result, width: int = 4, position: int = 0, axis: bool = True) -> Result:
        return self._result(given, width, position, axis, None, None)

    def token_local(self, *given: Result, width: int = 4, position: int = 0, axis: bool = True) -> Result:
        return self._result(given, width, position, axis, some_function, given[0] if given else None)

    def use(self, result: Result, position: int = 0) -> Result:
        result.read(self._tensors[result], Reader(position=position, result=None))
        return result

    def _result(
        self, given: Any, width: int, position: int, axis: bool, function: Any, source: Result | None
    ) -> Result:
        out = torch.zeros(TOKENS, width)
        where = Axis(dim=0) if axis else None
        line = len(self.results) + 1
        result = Result(
            out, where, position=position, span=(2, 6), tokens=TOKENS, line=line, function=function, source=source
        )
        for one in given:
            one.read(self._tensors[one], Reader(position=position, result=result))
        self.results.append(result)
        self._tensors[result] = out
        return result

    @property
    def _tensors(self) -> dict[Result, torch.Tensor]:
        return self.__dict__.setdefault("tensors", {})

    def treated(self, last: int = 9) -> list[Treatment]:
        return list(treatments(self.results, last))


def test_a_product_that_is_used_is_kept() -> None:
    forward = Forward()
    forward.use(forward.product())
    assert forward.treated() == [KEPT]


def test_a_product_that_only_another_product_reads_is_left_out_and_its_input_too() -> None:
    forward = Forward()
    gathered = forward.token_local()
    forward.use(forward.product(forward.product(gathered)))
    assert forward.treated() == [OMITTED, OMITTED, KEPT]


def test_what_is_used_after_the_end_is_not_used() -> None:
    forward = Forward()
    forward.use(forward.product(position=3), position=5)
    assert forward.treated(last=5) == [KEPT]
    assert forward.treated(last=4) == [OMITTED]
    assert forward.treated(last=2) == [REPEATED], "it is never come to"


def test_of_a_product_and_its_sum_the_sum_is_kept() -> None:
    forward = Forward()
    forward.use(forward.token_local(forward.product(width=8), width=1))
    assert forward.treated() == [OMITTED, KEPT]


def test_parts_that_are_exchanged_are_kept_in_place_of_their_product() -> None:
    forward = Forward()
    fused = forward.product(width=6)
    for _ in range(3):
        forward.use(forward.token_local(fused, width=2))
    assert forward.treated() == [OMITTED, KEPT, KEPT, KEPT]


def test_what_is_larger_than_the_product_is_made_again_of_it() -> None:
    forward = Forward()
    forward.use(forward.token_local(forward.product(width=2), width=4))
    assert forward.treated() == [KEPT, REPEATED]


def test_together_they_must_not_be_larger_either() -> None:
    forward = Forward()
    product = forward.product(width=4)
    for _ in range(2):
        forward.use(forward.token_local(product, width=3))
    assert forward.treated() == [KEPT, REPEATED, REPEATED]


def test_a_product_that_is_used_besides_is_kept_itself() -> None:
    forward = Forward()
    product = forward.product()
    forward.use(forward.token_local(product))
    forward.use(product)
    assert forward.treated() == [KEPT, REPEATED]


def test_a_token_local_function_of_anything_but_a_product_and_what_was_made_of_one_runs_again() -> None:
    forward = Forward()
    forward.use(forward.token_local())
    forward.use(forward.token_local(forward.token_local(forward.product())))
    assert forward.treated() == [REPEATED, OMITTED, OMITTED, KEPT]


def test_without_an_axis_everything_runs_again_and_what_it_reads_is_there() -> None:
    forward = Forward()
    forward.use(forward.product(forward.product(), axis=False))
    forward.use(forward.token_local(forward.product(), axis=False))
    assert forward.treated() == [KEPT, REPEATED, KEPT, REPEATED]


def test_partial_sums_are_let_go_of_when_they_are_summed() -> None:
    forward = Forward()
    product = forward.product(width=8)
    summed = forward.token_local(product, width=1)
    assert product._result is None
    forward.use(summed)
    assert summed._result is not None
    forward.use(product)  # after all
    assert product._result is not None


# Layers of one process, in which token-local functions stand for those of several ranks.

calls = 0


@token_local(lambda axis, *_: axis)
def summed(x: torch.Tensor) -> torch.Tensor:
    """As a sum over ranks: a new tensor."""
    global calls
    calls += 1
    return x * 0.5


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return summed(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 0.5


class Layer(nn.Module):
    """Up, `between`, tanh, down: tanh's result is saved, up's is not."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.between(self.up(self.norm(x)))))  # type: ignore[no-any-return]


def sum_of(x: torch.Tensor) -> torch.Tensor:
    return _Sum.apply(x)  # type: ignore[no-any-return, no-untyped-call]


def summed_and_used(x: torch.Tensor) -> torch.Tensor:
    return sum_of(x) + x


def summed_then_changed(x: torch.Tensor) -> torch.Tensor:
    """The sum is of the product as it was."""
    y = sum_of(x)
    return y + x.sin_()


def change_of_the_sum(x: torch.Tensor) -> torch.Tensor:
    return sum_of(x).mul_(2.0)


def seen_otherwise(x: torch.Tensor) -> torch.Tensor:
    return sum_of(x.unflatten(-1, (2, -1))).flatten(-2)


def differentiated(x: torch.Tensor) -> torch.Tensor:
    """A token-local function outside of any autograd function, which saves nothing."""
    return summed(x)


@token_local(lambda axis, *_: axis)
def saving(x: torch.Tensor) -> torch.Tensor:
    return x.sigmoid()


def used_as_another_type(x: torch.Tensor) -> torch.Tensor:
    x.detach().view(torch.float64).abs()
    return x.sin()


FORMS = {
    sum_of: 0,
    seen_otherwise: 0,
    change_of_the_sum: 0,
    differentiated: 0,
    summed_and_used: 2,  # of three layers the last stays
    summed_then_changed: 2,
    saving: None,
    used_as_another_type: None,
}


@pytest.mark.parametrize("alpha", [(0, 1, 0), (0.25, 0.5, 0.25)], ids=str)
@pytest.mark.parametrize("between", FORMS)
def test_gradients_are_equal_and_a_sum_is_made_again_only_where_its_product_is_used(
    between: Callable[[torch.Tensor], torch.Tensor], alpha: tuple[float, ...], tmp_path: Path
) -> None:
    global calls
    model, reference = stack(make=lambda: Layer(between)), stack(make=lambda: Layer(between))
    manager = memo.offload(model, alpha=alpha, disk=tmp_path, min_bytes=1)
    got = train(model, lambda step: model(ids(step)), manager)
    calls = 0
    got += train(model, lambda step: model(ids(step)), manager, steps=1)
    ran = calls - len(model.layers)
    want = [step for steps in (3, 1) for step in train(reference, lambda step: reference(ids(step)), steps=steps)]
    assert_equal(got, want)
    assert refused(manager) == {}
    assert manager.stats.bytes_recomputed > 0
    if FORMS[between] is not None:
        again = FORMS[between] or 0
        assert ran == again * (1 if alpha[2] == 0 else 2) + (0 if alpha[2] == 0 or again else 2)
    manager.close()


@pytest.mark.parametrize(("between", "kept"), [(sum_of, "sum"), (summed_and_used, "product")], ids=["sum", "product"])
def test_one_of_both_is_saved(between: Callable[[torch.Tensor], torch.Tensor], kept: str, tmp_path: Path) -> None:
    """Not both: as many bytes as a product has."""
    model = stack(make=lambda: Layer(between))
    manager = memo.offload(model, alpha=(0, 1, 0), disk=tmp_path, min_bytes=1)
    train(model, lambda step: model(ids(step)), manager, steps=1)
    for cost in manager.levels_profile():
        assert cost.bytes_per_token[Level.SAVE_MATMULS] == 2 * 64 * 4
    manager.close()


def test_a_layer_that_uses_in_backward_what_nothing_used_in_forward_is_an_error(tmp_path: Path) -> None:
    """And no gradient of what happened to be in that memory. Copies are not among the operators that are compared."""
    besides: list[bool] = []

    def between(x: torch.Tensor) -> torch.Tensor:
        return sum_of(x.clone() if besides else x)

    model = stack(make=lambda: Layer(between))
    manager = memo.offload(model, alpha=(0, 1, 0), disk=tmp_path, min_bytes=1)
    train(model, lambda step: model(ids(step)), manager, steps=1)
    with manager:
        loss = model(ids(1))
    besides.append(True)
    with pytest.raises(SwapError, match="uses a result that nothing used"):
        loss.backward()
    manager.close()


def test_a_layer_that_sums_something_else_in_backward_is_an_error(tmp_path: Path) -> None:
    twice: list[bool] = []

    def between(x: torch.Tensor) -> torch.Tensor:
        return saving(sum_of(x)) if twice else sum_of(saving(x))

    model = stack(make=lambda: Layer(between))
    manager = memo.offload(model, alpha=(0, 1, 0), disk=tmp_path, min_bytes=1)
    train(model, lambda step: model(ids(step)), manager, steps=1)
    with manager:
        loss = model(ids(1))
    twice.append(True)
    with pytest.raises(SwapError, match="did not repeat in backward"):
        loss.backward()
    manager.close()
