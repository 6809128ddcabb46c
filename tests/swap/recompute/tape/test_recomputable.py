"""Token-local functions between products: made again only where that spares bytes, and never wrong. They stand for
collectives of several ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from offload_models import refused
from small_models import assert_equal, ids, stack, train
from torch import nn

import memo
from memo.swap import Level

if TYPE_CHECKING:
    from pathlib import Path

calls = 0


@memo.recomputable
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
    def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
        return grads[0] * 0.5


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


@memo.recomputable
def saving(x: torch.Tensor) -> torch.Tensor:
    return x.sigmoid()


def used_as_another_type(x: torch.Tensor) -> torch.Tensor:
    x.detach().view(torch.float64).abs()
    return x.sin()


FORMS = [
    sum_of, summed_and_used, summed_then_changed, change_of_the_sum, seen_otherwise, differentiated, saving,
    used_as_another_type,
]  # fmt: skip


@pytest.mark.covering(1)
@pytest.mark.parametrize("alpha", [Level.SAVE_MATMULS, Level.SAVE_ATTENTION, (0.25, 0.5, 0.25)], ids=str)
@pytest.mark.parametrize("between", FORMS)
def test_gradients_are_equal_and_no_sum_is_made_twice_where_products_are_kept(
    between: Callable[[torch.Tensor], torch.Tensor], alpha: Any, tmp_path: Path
) -> None:
    global calls
    model, reference = stack(make=lambda: Layer(between)), stack(make=lambda: Layer(between))
    manager = memo.offload(model, alpha=alpha, disk=tmp_path, min_bytes=1)
    got = train(model, lambda step: model(ids(step)), manager)
    calls = 0
    got += train(model, lambda step: model(ids(step)), manager, steps=1)
    again = calls - len(model.layers)
    want = [step for steps in (3, 1) for step in train(reference, lambda step: reference(ids(step)), steps=steps)]
    assert_equal(got, want)
    assert refused(manager) == {}
    assert manager.stats.bytes_recomputed > 0
    # Of three layers the last stays. Where a product is used besides, its sum is made of it again, or kept with the rest.
    assert again <= (0 if alpha is Level.SAVE_MATMULS and between not in (summed_and_used, summed_then_changed) else 4)
    manager.close()


@pytest.mark.parametrize("between", [sum_of, summed_and_used])
def test_of_a_product_and_its_sum_one_is_kept(between: Callable[[torch.Tensor], torch.Tensor], tmp_path: Path) -> None:
    """Per token: the layer's input, and as many bytes as a product has; the norm's are made again."""
    model = stack(make=lambda: Layer(between))
    manager = memo.offload(model, alpha=Level.SAVE_MATMULS, disk=tmp_path, min_bytes=1)
    train(model, lambda step: model(ids(step)), manager)
    before = manager.stats.bytes_disk
    train(model, lambda step: model(ids(step)), manager, steps=1)
    assert manager.stats.bytes_disk - before == 2 * 2 * 48 * (32 + 64) * 4
    manager.close()


def test_what_gives_a_dict_is_kept_and_the_rest_of_its_layer_recomputed(tmp_path: Path) -> None:
    @memo.recomputable
    def both(x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"sin": x.sin(), "cos": x.cos()}

    def between(x: torch.Tensor) -> torch.Tensor:
        return x * both(x.detach())["sin"]

    model, reference = stack(make=lambda: Layer(between)), stack(make=lambda: Layer(between))
    manager = memo.offload(model, alpha=0.0, disk=tmp_path, min_bytes=1)
    assert_equal(
        train(model, lambda step: model(ids(step)), manager), train(reference, lambda step: reference(ids(step)))
    )
    assert refused(manager) == {}
    assert manager.stats.bytes_recomputed > 0
    manager.close()


class _Shifts(nn.Module):
    """A function that reads more than the tensors that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.shift = nn.Linear(32, 32), nn.Parameter(torch.ones(32))
        self.register_buffer("table", torch.ones(32))

    @memo.recomputable
    def shifted(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.shift + self.table

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.shifted(self.linear(x)).sin()  # type: ignore[no-any-return]


class _ShiftsByClosure(_Shifts):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        table = self.table

        @memo.recomputable
        def shifted(x: torch.Tensor) -> torch.Tensor:
            return x + table

        return shifted(self.linear(x)).sin()  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", ["shift", "table", "closure"])
def test_what_a_function_reads_besides_its_arguments_must_not_change(name: str, tmp_path: Path) -> None:
    model = nn.Sequential(*[(_ShiftsByClosure if name == "closure" else _Shifts)() for _ in range(3)])
    manager = memo.offload(model, layers=[*model], alpha=0.0, disk=tmp_path, min_bytes=256)
    with manager:
        loss = model(torch.randn(2, 16, 32)).sum()
    with torch.no_grad():
        getattr(model[0], "shift" if name == "shift" else "table").add_(1)
    with pytest.raises(memo.MemoError, match="changed in place after it was saved"):
        loss.backward()
    manager.close()
