"""A layer's Python runs once: hooks, compiled functions, transforms and interruptions are those of a run without memo."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
import torch
from changed_layers import Finds, by_recompute, trains_equally
from small_models import Stack, assert_equal, gradients, ids, plain, stack, train
from strange_layers import Layer, PutsAside
from torch.func import vmap
from torch.nn import functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode

if TYPE_CHECKING:
    from collections.abc import Callable

    import memo


class MadeInInferenceMode(Layer):
    """A table that has no version counter."""

    def __init__(self) -> None:
        super().__init__()
        with torch.inference_mode():
            self.register_buffer("table", torch.ones(32))

    def strange(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.table).sin()


@by_recompute
def test_layers_under_vmap_move_whole(offload: Callable[..., memo.Manager], how: dict[str, Any]) -> None:
    def step(model: Stack) -> Callable[[int], torch.Tensor]:
        batches = torch.stack([ids(0), ids(1)])
        return lambda step: vmap(lambda batch: model(batch))(batches).sum()

    model, reference = stack(make=Finds), stack(make=Finds)
    assert_equal(train(model, step(model), offload(model, **how)), train(reference, step(reference)))


@by_recompute
def test_hooks_on_modules_are_called_once(offload: Callable[..., memo.Manager], how: dict[str, Any]) -> None:
    """Features of inner modules, as distillation wants them: the loss is made of what the hooks were told."""

    def forward(model: Stack) -> Callable[[int], torch.Tensor]:
        features: list[torch.Tensor] = []
        for layer in model.layers:
            layer.up.register_forward_hook(lambda module, args, output: features.append(output))  # type: ignore[union-attr]

        def step(number: int) -> torch.Tensor:
            features.clear()
            loss: torch.Tensor = model(ids(number))
            return loss + torch.stack([feature.square().mean() for feature in features]).sum()

        return step

    trains_equally(offload, how, lambda: stack(make=Finds), forward)


class Listens(Stack):
    """Puts hooks on its layers' modules for the time of a forward, as adapters of mixed batches do."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        features: list[torch.Tensor] = []
        hooks = [
            layer.up.register_forward_hook(lambda module, args, output: features.append(output))  # type: ignore[union-attr]
            for layer in self.layers
        ]
        loss = super().forward(ids)
        for hook in hooks:
            hook.remove()
        return loss + torch.stack([feature.square().mean() for feature in features]).sum() / len(features)


def listens() -> Listens:
    torch.manual_seed(0)
    return Listens(make=Finds)


class Rewrites(Layer):
    """Saves a buffer for nothing, changes it in place and saves it again; while the gate is closed it stays the same."""

    def strange(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y.sin()
        y.mul_(1 + self.gate)
        return y.sin()


LAYERS = {
    "a table made in inference mode": lambda: stack(make=MadeInInferenceMode),
    "a buffer saved again": lambda: stack(make=Rewrites),
    "hooks put there in the forward": listens,
}


@by_recompute
@pytest.mark.parametrize("what", LAYERS)
def test_layers_train_as_without_memo(offload: Callable[..., memo.Manager], what: str, how: dict[str, Any]) -> None:
    trains_equally(offload, how, LAYERS[what])


@by_recompute
def test_what_a_layer_puts_aside_is_of_its_forward(offload: Callable[..., memo.Manager], how: dict[str, Any]) -> None:
    def forward(model: Stack) -> Callable[[int], torch.Tensor]:
        def step(number: int) -> torch.Tensor:
            loss: torch.Tensor = model(ids(number))
            return loss + torch.stack([layer.aside.square().mean() for layer in model.layers]).sum()  # type: ignore[operator, union-attr]

        return step

    trains_equally(offload, how, lambda: stack(make=PutsAside), forward)


class CompilesAFunction(Layer):
    @staticmethod
    @torch.compile(backend="inductor")
    def compiled(x: torch.Tensor) -> torch.Tensor:
        return F.silu(x.sin()) * x.exp().clamp(max=3) + x.cos()

    def strange(self, x: torch.Tensor) -> torch.Tensor:
        return self.compiled(x)  # type: ignore[no-any-return]


@by_recompute
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_function_stays_compiled(offload: Callable[..., memo.Manager], how: dict[str, Any]) -> None:
    """Operator by operator it would round in another way."""
    want = plain(lambda: stack(make=CompilesAFunction))
    model = stack(make=CompilesAFunction)
    assert_equal(train(model, lambda step: model(ids(step)), offload(model, **how)), want)


_SHIFT = torch.zeros(32)


class CompilesWhatReads(Layer):
    @staticmethod
    @torch.compile(backend="inductor")
    def compiled(x: torch.Tensor) -> torch.Tensor:
        return x + _SHIFT

    def strange(self, x: torch.Tensor) -> torch.Tensor:
        return self.compiled(x).sin()  # type: ignore[no-any-return]


class EndsCompiled(CompilesWhatReads):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.compiled(super().forward(x))  # type: ignore[no-any-return]


@by_recompute
@pytest.mark.parametrize("kind", [CompilesWhatReads, EndsCompiled])
@pytest.mark.filterwarnings("ignore")
def test_what_a_compiled_function_reads_may_change_before_backward(
    offload: Callable[..., memo.Manager], kind: type[Layer], how: dict[str, Any]
) -> None:
    """Nothing of what it does is seen, so its layer moves whole."""

    def step(model: Stack, manager: Any) -> list[torch.Tensor | None]:
        _SHIFT.zero_()
        with manager:
            loss = model(ids())
        _SHIFT.fill_(1.0)
        loss.backward()
        return gradients(model)

    want = step(stack(make=kind), contextlib.nullcontext())
    model = stack(make=kind)
    got = step(model, offload(model, **how))
    assert all(map(torch.equal, got, want))  # type: ignore[arg-type]


class Interrupted(Layer):
    interrupts = False

    def strange(self, x: torch.Tensor) -> torch.Tensor:
        y = x.sin()
        if Interrupted.interrupts:
            raise KeyboardInterrupt
        return y * x


@by_recompute
def test_ctrl_c_within_a_layer_is_followed_by_a_normal_step(
    offload: Callable[..., memo.Manager], how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch calls no hook of a module that such an exception leaves."""
    model = stack(make=Interrupted)
    manager = offload(model, **how)
    with monkeypatch.context() as patch:
        patch.setattr(Interrupted, "interrupts", True)
        with contextlib.suppress(KeyboardInterrupt), manager:
            model(ids())
    assert _get_current_dispatch_mode() is None
    assert_equal(train(model, lambda step: model(ids(step)), manager), plain(lambda: stack(make=Interrupted)))
    assert manager.stats.bytes_recomputed > 0
