"""Layers that must not be split by tokens are not, also where the first step alone would not show it; and what is changed
between forward and backward is an error. No path here may give a wrong gradient silently."""

from __future__ import annotations

import contextlib
import gc
import random
import warnings
from typing import TYPE_CHECKING, Any

import pytest
import torch
from small_models import Block, Stack, assert_equal, gradients, ids, stack, train
from strange_layers import STRANGE, Layer, Rolls
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import memo
from memo.errors import ModifiedAfterSave, SwapError, UsageError
from memo.swap.token_levels import Level

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def offload(model: nn.Module, tmp_path: Path, **options: Any) -> memo.Manager:
    return memo.offload(model, **{"disk": tmp_path, "min_bytes": 512, "alpha": 0.25, **options})


def reasons(manager: memo.Manager) -> set[str]:
    use = manager.report().tokenwise
    assert use is not None
    return set(use.refused.values())


def seeded(model: nn.Module, batch: int = 2) -> Callable[[int], torch.Tensor]:
    def forward(step: int) -> torch.Tensor:
        torch.manual_seed(step)
        random.seed(step)
        loss: torch.Tensor = model(ids(step, batch))
        return loss

    return forward


@pytest.mark.parametrize("kind", STRANGE, ids=lambda kind: kind.__name__)
def test_a_layer_that_is_not_token_wise_moves_whole_and_is_equal(kind: type[Layer], tmp_path: Path) -> None:
    model, reference = stack(make=kind), stack(make=kind)
    want = train(reference, seeded(reference))
    state = torch.get_rng_state()
    manager = offload(model, tmp_path)
    with pytest.warns(RuntimeWarning, match=STRANGE[kind]) as caught:
        assert_equal(train(model, seeded(model), manager), want)
    assert len([w for w in caught if "whole tensors" in str(w.message)]) == len(reasons(manager))
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), reference.buffers(), strict=True))
    assert manager.stats.bytes_recomputed == 0
    gc.collect()
    assert manager.stats.live_entries == 0
    manager.close()


def test_more_sequences_than_one_and_as_many_as_tokens(tmp_path: Path) -> None:
    """Dimensions of equal size are told apart by the axis, not by their size."""
    model, reference = stack(), stack()

    def forward(module: Stack) -> Callable[[int], torch.Tensor]:
        return lambda step: module(ids(step, batch=32, seq=32))  # batch, tokens and hidden are all 32

    manager = offload(model, tmp_path)
    assert_equal(train(model, forward(model), manager), train(reference, forward(reference)))
    assert reasons(manager) == set()
    assert manager.stats.bytes_recomputed > 0
    manager.close()


def test_sequences_of_several_lengths(tmp_path: Path) -> None:
    model, reference = stack(), stack()

    def forward(module: Stack) -> Callable[[int], torch.Tensor]:
        return lambda step: module(ids(step, seq=(48, 31, 64, 48, 2)[step]))

    manager = offload(model, tmp_path)
    got = train(model, forward(model), manager, steps=5)
    assert_equal(got, train(reference, forward(reference), steps=5))
    assert manager.stats.bytes_recomputed > 0
    manager.close()


def test_double_backward(tmp_path: Path) -> None:
    class Smooth(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.down(torch.tanh(self.up(x)))

    def second_order(manager: Any, model: Stack) -> list[torch.Tensor]:
        parameters = list(model.parameters())
        with manager:
            loss = model(ids())
        first = torch.autograd.grad(loss, parameters, create_graph=True)
        return list(torch.autograd.grad(sum((g * g).sum() for g in first), parameters))  # type: ignore[arg-type]

    model = stack(make=Smooth)
    manager = offload(model, tmp_path)
    got = second_order(manager, model)
    want = second_order(contextlib.nullcontext(), stack(make=Smooth))
    assert manager.stats.bytes_recomputed > 0
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_a_bias_changed_before_backward_is_an_error(tmp_path: Path) -> None:
    """Autograd does not save a bias, so it would not notice; a recompute would use the new one."""
    model = stack()
    with offload(model, tmp_path):
        loss = model(ids())
    with torch.no_grad():
        model.layers[0].up.bias.add_(1.0)  # type: ignore[union-attr, operator]
    with pytest.raises(ModifiedAfterSave, match="step the optimizer after backward"):
        loss.backward()


class Rotated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block(32, 2)

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return self.block(x * table)  # type: ignore[no-any-return]


class Turned(Rotated):
    """By complex numbers, as Llama's first code does."""

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        turned = torch.view_as_complex(x.unflatten(-1, (-1, 2))) * torch.polar(table, table)[..., ::2]
        return self.block(torch.view_as_real(turned).flatten(-2))  # type: ignore[no-any-return]


class RotatedStack(Stack):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.table = torch.linspace(0.5, 2.0, ids.size(1)).view(1, -1, 1).repeat(1, 1, 32)
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, self.table)
        return x.square().mean()


@pytest.mark.parametrize("kind", [Rotated, Turned])
def test_an_argument_over_the_tokens_is_cut_and_watched(kind: type[Rotated], tmp_path: Path) -> None:
    def make() -> RotatedStack:
        torch.manual_seed(0)
        return RotatedStack(make=kind)

    model, reference = make(), make()
    manager = offload(model, tmp_path)
    got = train(model, lambda step: model(ids(step)), manager)
    assert_equal(got, train(reference, lambda step: reference(ids(step))))
    assert reasons(manager) == set()
    assert manager.stats.bytes_recomputed > 0
    with manager:
        loss = model(ids())
    model.table.add_(1.0)
    with pytest.raises(ModifiedAfterSave):
        loss.backward()


class Moody(nn.Module):
    """What it does depends on something that is no tensor: its own attribute, or one that nobody watches."""

    elsewhere = False

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.act: nn.Module = nn.GELU()
        self.scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if Moody.elsewhere:
            x = x.exp().log()
        return x + self.scale * self.down(self.act(self.up(x)))


def test_a_layer_that_does_something_else_in_backward_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = stack(make=Moody)
    with offload(model, tmp_path):
        loss = model(ids())
    monkeypatch.setattr(Moody, "elsewhere", True)
    with pytest.raises(SwapError, match="did not repeat"):
        loss.backward()


def changes_an_attribute(layer: Any) -> None:
    layer.scale = 2.0


def changes_the_mode(layer: Any) -> None:
    layer.up.eval()


def changes_a_module(layer: Any) -> None:
    layer.act = nn.ReLU()


def changes_a_modules_attribute(layer: Any) -> None:
    layer.act.approximate = "tanh"


@pytest.mark.parametrize("how", [{}, {"fallback": "recompute", "levels": dict.fromkeys(range(3), Level.SAVE_INPUT)}])
@pytest.mark.parametrize(
    "change", [changes_an_attribute, changes_the_mode, changes_a_module, changes_a_modules_attribute]
)
def test_plain_state_changed_before_backward_is_an_error(
    change: Callable[[Any], None], how: dict[str, Any], tmp_path: Path
) -> None:
    """The last layer's tensors are still there, so the one before is the first to be recomputed."""
    model = stack(make=Moody)
    with offload(model, tmp_path, **how):
        loss = model(ids())
    change(model.layers[1])
    with pytest.raises(ModifiedAfterSave, match=r"of layers\.1 was changed"):
        loss.backward()


def test_a_result_of_attention_that_is_changed_in_place_is_refused(tmp_path: Path) -> None:
    """What is kept whole would be changed twice. The change is by zero at first, where a trial would not see it."""

    class Scales(Layer):
        def strange(self, x: torch.Tensor) -> torch.Tensor:
            return memo.memoize(torch.sin, token_dim=1)(x).mul_(1 + self.gate)  # type: ignore[no-any-return]

    model, reference = stack(make=Scales), stack(make=Scales)
    manager = offload(model, tmp_path)
    with pytest.warns(RuntimeWarning, match="changes a result in place that is not computed again"):
        got = train(model, lambda step: model(ids(step)), manager)
    assert_equal(got, train(reference, lambda step: reference(ids(step))))


class Turns(Block):
    """Moves the generator on, by no operator that a mode sees; sharded dropout does so on GPUs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(torch.initial_seed() + 1)
        return super().forward(x)


@pytest.mark.filterwarnings("ignore:.*its recompute draws random numbers:RuntimeWarning")
def test_a_trial_leaves_random_numbers_as_it_found_them(tmp_path: Path) -> None:
    model = stack(make=lambda: Turns(32, 2))
    drawn = []
    for manager in (None, offload(model, tmp_path)):
        torch.manual_seed(0)
        with manager or contextlib.nullcontext():
            model(ids(0))
        drawn.append(torch.rand(3))
    assert torch.equal(*drawn)
    assert reasons(manager) == {"its recompute draws random numbers"}
    manager.close()


def test_a_compiled_layer_moves_whole(tmp_path: Path) -> None:
    model, reference = stack(), stack()
    for module in (model, reference):
        for layer in module.layers:
            layer.compile(backend="aot_eager")
    manager = offload(model, tmp_path)
    with pytest.warns(RuntimeWarning, match="it is compiled"):
        got = train(model, lambda step: model(ids(step)), manager)
    assert_equal(got, train(reference, lambda step: reference(ids(step))))
    manager.close()


class Conditioned(nn.Module):
    """Uses a tensor that it was not given but finds."""

    found = torch.zeros(())

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(32, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x * Conditioned.found)  # type: ignore[no-any-return]


def test_a_tensor_that_a_layer_finds_must_be_the_same_in_backward(tmp_path: Path) -> None:
    def forward(module: Stack) -> Callable[[int], torch.Tensor]:
        def step(number: int) -> torch.Tensor:
            Conditioned.found = torch.full((2, 1, 32), 1.0 + number)
            loss: torch.Tensor = module(ids(number))
            return loss

        return step

    model, reference = stack(make=Conditioned), stack(make=Conditioned)
    manager = offload(model, tmp_path)
    assert_equal(train(model, forward(model), manager), train(reference, forward(reference)))
    assert reasons(manager) == set()
    with manager:
        first = forward(model)(0)
        forward(model)(1)
    with pytest.raises(SwapError, match="did not repeat"):
        first.backward()


def test_a_choice_of_attention_kernels_that_ended_before_backward(tmp_path: Path) -> None:
    model, reference = stack(), stack()
    manager = offload(model, tmp_path)
    with manager:
        loss = model(ids())
    with sdpa_kernel([SDPBackend.MATH]):
        loss.backward()
    reference(ids()).backward()
    assert manager.stats.bytes_recomputed > 0
    assert all(torch.equal(a, b) for a, b in zip(gradients(model), gradients(reference), strict=True))  # type: ignore[arg-type]


class Attends(nn.Module):
    """Attention of one's own; what makes it is given, marked or not."""

    def __init__(self, attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.norm, self.qkv = nn.LayerNorm(32), nn.Linear(32, 96)
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.attend = attend

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attend(*self.qkv(self.norm(x)).chunk(3, -1))
        return x + self.down(F.gelu(self.up(x)))


def by_hand(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    scores = (q @ k.transpose(1, 2)) / 6
    hidden = torch.ones_like(scores, dtype=torch.bool).triu(1)
    return scores.masked_fill(hidden, -torch.inf).softmax(-1) @ v


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("alpha", [0.0, 0.25, 0.75])
def test_a_marked_function_is_not_computed_twice(alpha: float, batch: int, tmp_path: Path) -> None:
    calls = 0

    @memo.memoize(token_dim=1)
    def marked(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return by_hand(q, k, v)

    model, reference = stack(make=lambda: Attends(marked)), stack(make=lambda: Attends(by_hand))
    manager = offload(model, tmp_path, alpha=alpha)
    got = train(model, lambda step: model(ids(step, batch)), manager)
    assert calls == 3 * 3
    assert_equal(got, train(reference, lambda step: reference(ids(step, batch))))
    assert reasons(manager) == set()
    assert manager.stats.bytes_recomputed > 0
    gc.collect()
    assert manager.stats.live_entries == 0
    manager.close()


def test_a_marked_function_that_returns_its_argument_is_refused(tmp_path: Path) -> None:
    marked = memo.memoize(lambda q, k, v: q.view(q.shape), token_dim=1)
    model = stack(make=lambda: Attends(marked))
    reference = stack(make=lambda: Attends(lambda q, k, v: q.view(q.shape)))
    manager = offload(model, tmp_path)
    with pytest.warns(RuntimeWarning, match="returns a view of its arguments"):
        got = train(model, lambda step: model(ids(step)), manager)
    assert_equal(got, train(reference, lambda step: reference(ids(step))))


@pytest.mark.parametrize("alpha", [-0.1, 1.1, float("nan")])
def test_alpha_is_a_fraction(alpha: float, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="alpha"):
        offload(stack(), tmp_path, alpha=alpha)


def test_no_warning_where_everything_moves_anyway(tmp_path: Path) -> None:
    model = stack(make=Rolls)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, lambda step: model(ids(step)), offload(model, tmp_path, alpha=1.0))
