"""Layers that count, collect, draw, ask or mix tokens are divided as any other, and are left as one forward leaves them."""

from __future__ import annotations

import contextlib
import gc
import random
import warnings
from typing import TYPE_CHECKING, Any

import numpy
import pytest
import torch
from slow_tests import first
from small_models import Block, Stack, assert_equal, gradients, ids, stack, train
from strange_layers import STRANGE, Layer, Rolls
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import memo
from memo.errors import ModifiedAfterSave, SwapError, UsageError
from memo.events import TierName
from memo.swap import Level
from memo.swap.recompute.trial import ReplayMismatch
from memo.swap.recompute.trials import Trials

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def offload(model: nn.Module, tmp_path: Path, **options: Any) -> memo.Manager:
    return memo.offload(model, **{"disk": tmp_path, "min_bytes": 512, "alpha": 0.25, **options})


def reasons(manager: memo.Manager) -> set[str]:
    use = manager.report().recompute
    assert use is not None
    return set(use.refused.values())


def seeded(model: nn.Module, batch: int = 2) -> Callable[[int], torch.Tensor]:
    def forward(step: int) -> torch.Tensor:
        torch.manual_seed(step)
        random.seed(step)
        loss: torch.Tensor = model(ids(step, batch))
        return loss

    return forward


WAYS = [{"alpha": 0.25}, {"alpha": (0.25, 0.5, 0.25)}, {"alpha": Level.SAVE_INPUT}]
by_recompute = pytest.mark.parametrize("how", WAYS, ids=["tokens", "three levels", "whole"])


def left_by(model: Stack, steps: Callable[[], list[Any]]) -> tuple[list[Any], list[float], list[Any]]:
    """What the steps give, what they leave in layers and buffers, and the states of all generators after them."""
    before = [layer.left() for layer in model.layers]  # type: ignore[operator, union-attr]
    done = steps()
    states = [torch.get_rng_state().tolist(), random.getstate(), str(numpy.random.get_state())]
    after = [layer.left() for layer in model.layers]  # type: ignore[operator, union-attr]
    return done, [now - then for now, then in zip(after, before, strict=True)], states


@pytest.mark.covering(1)
@by_recompute
@pytest.mark.parametrize("kind", STRANGE, ids=lambda kind: kind.__name__)
def test_any_layer_is_divided_and_left_as_one_forward_leaves_it(
    kind: type[Layer], how: dict[str, Any], tmp_path: Path
) -> None:
    model, reference = stack(make=kind), stack(make=kind)
    want, books, states = left_by(reference, lambda: train(reference, seeded(reference)))
    manager = offload(model, tmp_path, **how)
    got, ours, after = left_by(model, lambda: train(model, seeded(model), manager))
    assert_equal(got, want)
    assert ours == books
    assert after == states
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), reference.buffers(), strict=True))
    assert manager.stats.bytes_recomputed > 0
    assert reasons(manager) == set()
    gc.collect()
    assert manager.stats.live_entries == 0
    manager.close()
    assert manager.stats.device_bytes == 0


def moved_in_a_step(kind: type[Layer], alpha: Any, tmp_path: Path) -> int:
    """Of the last of some steps: the first keep what they have, the later ones what was chosen."""
    model = stack(make=kind)
    manager = offload(model, tmp_path, alpha=alpha, min_bytes=1)
    train(model, seeded(model), manager)
    before = manager.stats.bytes_disk
    train(model, seeded(model), manager, steps=1)
    manager.close()
    return manager.stats.bytes_disk - before


# Bytes that move at alpha 0, of those at alpha 1: what draws or has a state of its own is kept, and what is found besides.
MOST = dict.fromkeys(STRANGE, 0.5)


@pytest.mark.parametrize("kind", first(STRANGE, 14), ids=lambda kind: kind.__name__)
def test_less_moves_than_without_recompute(kind: type[Layer], tmp_path: Path) -> None:
    every, some = (moved_in_a_step(kind, alpha, tmp_path) for alpha in (1.0, 0.0))
    assert some <= MOST[kind] * every, f"{some / every:.2f}"


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


def test_a_result_of_a_marked_function_that_is_changed_in_place(tmp_path: Path) -> None:
    """The change is by zero at first, where a trial would not see that it were made twice."""

    class Scales(Layer):
        def strange(self, x: torch.Tensor) -> torch.Tensor:
            return memo.memoize(torch.sin)(x).mul_(1 + self.gate)  # type: ignore[no-any-return]

    model, reference = stack(make=Scales), stack(make=Scales)
    manager = offload(model, tmp_path)
    got = train(model, lambda step: model(ids(step)), manager)
    assert_equal(got, train(reference, lambda step: reference(ids(step))))
    assert manager.stats.bytes_recomputed > 0
    manager.close()


class Turns(Block):
    """Moves the generator on, by no operator that a mode sees; sharded dropout does so on GPUs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.manual_seed(torch.initial_seed() + 1)
        return super().forward(x)


def test_a_trial_leaves_random_numbers_as_it_found_them(tmp_path: Path) -> None:
    model = stack(make=lambda: Turns(32, 2))
    drawn = []
    for manager in (None, offload(model, tmp_path)):
        torch.manual_seed(0)
        with manager or contextlib.nullcontext():
            model(ids(0))
        drawn.append(torch.rand(3))
    assert torch.equal(*drawn)
    assert reasons(manager) == set()
    manager.close()


def test_a_compiled_layer_moves_whole_and_is_equal(tmp_path: Path) -> None:
    """Operator by operator it would round in another way."""
    model, reference = stack(), stack()
    for module in (model, reference):
        for layer in module.layers:
            layer.compile(backend="aot_eager")
    manager = offload(model, tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        got = train(model, lambda step: model(ids(step)), manager)
    assert_equal(got, train(reference, lambda step: reference(ids(step))))
    manager.close()


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


@pytest.mark.covering(1)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("alpha", [0.0, 0.25, 0.75])
def test_a_marked_function_is_not_computed_twice(alpha: float, batch: int, tmp_path: Path) -> None:
    calls = 0

    @memo.memoize
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


def test_a_marked_function_that_returns_a_view_of_its_argument(tmp_path: Path) -> None:
    marked = memo.memoize(lambda q, k, v: q.view(q.shape))
    model = stack(make=lambda: Attends(marked))
    reference = stack(make=lambda: Attends(lambda q, k, v: q.view(q.shape)))
    manager = offload(model, tmp_path)
    got = train(model, lambda step: model(ids(step)), manager)
    assert_equal(got, train(reference, lambda step: reference(ids(step))))
    assert manager.stats.bytes_recomputed > 0
    manager.close()


@pytest.mark.parametrize("alpha", [-0.1, 1.1, float("nan")])
def test_alpha_is_a_fraction(alpha: float, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="alpha"):
        offload(stack(), tmp_path, alpha=alpha)


def test_no_warning_where_everything_moves_anyway(tmp_path: Path) -> None:
    model = stack(make=Rolls)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(model, lambda step: model(ids(step)), offload(model, tmp_path, alpha=1.0))


class Interleaved(nn.Module):
    """Saves halves of a storage, as gates of gpt-oss's experts, after an operator in place."""

    def __init__(self) -> None:
        super().__init__()
        self.wide = nn.Linear(32, 64, bias=False)
        self.bias = nn.Parameter(torch.zeros(64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = self.wide(x).add_(self.bias)
        gate, up = wide[..., ::2], wide[..., 1::2]
        return x + gate.clamp(max=1) * up.clamp(-1, 1)


def test_what_views_save_of_a_storage_changed_in_place_is_replayed(tmp_path: Path) -> None:
    model, reference = stack(make=Interleaved), stack(make=Interleaved)
    want = train(reference, seeded(reference))
    manager = offload(model, tmp_path, alpha=Level.SAVE_INPUT)
    assert_equal(train(model, seeded(model), manager), want)
    inputs = ids(0, 2).numel() * 32 * 4
    moved = max(use.peak_bytes for use in manager.report().tiers if use.tier is not TierName.DEVICE)
    assert 0 < moved <= len(model.layers) * inputs
    manager.close()


@pytest.mark.parametrize(
    "fault", [AssertionError(), KeyError(7), IndexError("beyond")], ids=lambda fault: type(fault).__name__
)
def test_a_fault_in_planning_moves_the_layer_whole_and_is_told(
    fault: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise fault

    model, reference = stack(), stack()
    want = train(reference, seeded(reference))
    manager = offload(model, tmp_path, alpha=0.0)
    monkeypatch.setattr("memo.swap.recompute.plans.Plans._made", fail)
    with pytest.warns(RuntimeWarning, match=f"by a fault of memo's .{type(fault).__name__} in fail"):
        assert_equal(train(model, seeded(model), manager), want)
    assert len(reasons(manager)) == 1
    assert manager.stats.bytes_recomputed == 0
    manager.close()


def test_a_fault_in_planning_what_other_ranks_repeat_is_an_error_that_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object, call: Any, *__: object) -> None:
        call.recorder.collectives.append(object())
        raise AssertionError

    model = stack()
    manager = offload(model, tmp_path, alpha=0.0)
    monkeypatch.setattr("memo.swap.recompute.plans.Plans.of", fail)
    with pytest.raises(SwapError, match=r"layers.0, in which other ranks take part.* fault of memo's .*levels="):
        train(model, seeded(model), manager)
    manager.close()


class Flushes(Block):
    """Flushes denormals for a part of its forward, which a replay does not do: its trial fails."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = super().forward(x)
        torch.set_flush_denormal(True)
        small = y.mul(1e-38).mul(0.1)
        torch.set_flush_denormal(False)
        return y + small.mul(1e38).sin()


def test_the_error_of_a_trial_holds_no_frames_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its traceback it held the call, its handles and what they save, in a cycle that only a collection ends."""
    found: list[ReplayMismatch] = []
    known = Trials.unlike

    def unlike(self: Trials, *args: Any) -> ReplayMismatch | None:
        error = known(self, *args)
        found.extend(() if error is None else (error,))
        return error

    monkeypatch.setattr(Trials, "unlike", unlike)
    model = stack(make=lambda: Flushes(32, 2))
    manager = offload(model, tmp_path, alpha=0.0)
    with manager:
        model(ids(0)).backward()
    manager.close()
    assert found
    assert [error.__traceback__ for error in found] == [None] * len(found)
