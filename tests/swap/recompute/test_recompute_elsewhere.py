"""A recompute finds all as the forward found it and leaves nothing behind; else it is an error, or is not tried."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
import torch
from small_models import Stack, assert_equal, gradients, ids, plain, stack, train
from strange_layers import Layer, PutsAside
from torch import nn
from torch.func import functional_call, vmap
from torch.nn import functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode

from memo.errors import ModifiedAfterSave, SwapError
from memo.swap.token_levels import Level

if TYPE_CHECKING:
    from collections.abc import Callable

    import memo

RECOMPUTES = [
    {"alpha": 0.25},
    {"alpha": (0.25, 0.5, 0.25)},
    {"alpha": None, "levels": dict.fromkeys(range(3), Level.SAVE_INPUT)},
]
by_recompute = pytest.mark.parametrize("how", RECOMPUTES, ids=["tokens", "matmuls", "whole"])


class Finds(nn.Module):
    """What it does depends on what it holds in ways that no attribute shows."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.settings: dict[str, Any] = {"scale": 1.0, "act": F.gelu, "shift": torch.zeros(64)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.settings["act"](self.up(x) + self.settings["shift"]) * self.settings["scale"]
        return x + self.down(y)  # type: ignore[no-any-return]


def changes_a_number(layer: Any) -> None:
    layer.settings["scale"] = 2.0


def changes_a_function(layer: Any) -> None:
    layer.settings["act"] = F.silu


def changes_a_tensor(layer: Any) -> None:
    layer.settings["shift"].add_(1.0)


def changes_for_another_tensor(layer: Any) -> None:
    layer.settings["shift"] = torch.ones(64)


def changes_a_parameter_for_another(layer: Any) -> None:
    layer.up.bias = nn.Parameter(torch.ones(64))


def freezes_a_parameter(layer: Any) -> None:
    layer.up.weight.requires_grad_(False)


@by_recompute
@pytest.mark.parametrize(
    "change",
    [
        changes_a_number,
        changes_a_function,
        changes_a_tensor,
        changes_for_another_tensor,
        changes_a_parameter_for_another,
        freezes_a_parameter,
    ],
)
def test_what_changed_before_backward_is_an_error(
    offload: Callable[..., memo.Manager], change: Callable[[Any], None], how: dict[str, Any]
) -> None:
    model = stack(make=Finds)
    with offload(model, **how):
        loss = model(ids())
    for layer in model.layers:
        change(layer)
    with pytest.raises(SwapError, match="did not repeat"):
        loss.backward()


class Chooses(Finds):
    """What it computes hangs on numbers in lists, parts of a table, constants, and which result is used where."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.linspace(0.5, 2.0, 100))
        self.settings |= {"over": 3, "start": 0, "constant": 0.5, "which": 0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        choice = self.settings
        y = self.up(x) * self.table[choice["start"] : choice["start"] + 64]
        squares = y.unflatten(-1, (8, 8))
        y = (squares * squares.sum([choice["over"]]).unsqueeze(-1)).flatten(2)
        y = (y.sin(), y.cos())[choice["which"]] * torch.tensor(choice["constant"])
        return x + self.down(torch.tanh(y + choice["shift"].double()).float())  # type: ignore[no-any-return]


@by_recompute
@pytest.mark.parametrize(
    "choice", [{"over": 2}, {"start": 7}, {"constant": 2.0}, {"which": 1}, {"shift": torch.ones(64)}]
)
def test_what_was_chosen_otherwise_before_backward_is_an_error(
    offload: Callable[..., memo.Manager], choice: dict[str, Any], how: dict[str, Any]
) -> None:
    model = stack(make=Chooses)
    manager = offload(model, **how)
    assert_equal(train(model, lambda step: model(ids(step)), manager), plain(lambda: stack(make=Chooses)))
    assert manager.stats.bytes_recomputed > 0
    with manager:
        loss = model(ids())
    for layer in model.layers:
        layer.settings.update(choice)  # type: ignore[operator, union-attr]
    with pytest.raises(SwapError, match="did not repeat"):
        loss.backward()


@by_recompute
@pytest.mark.parametrize("change", [changes_a_parameter_for_another, freezes_a_parameter])
def test_what_changed_behind_a_cast_of_autocast_is_an_error(
    offload: Callable[..., memo.Manager], change: Callable[[Any], None], how: dict[str, Any]
) -> None:
    """Two calls of the model, so that the second one's forward finds its parameters cast already."""
    model = stack(make=Finds)
    with offload(model, **how), torch.autocast("cpu", torch.bfloat16):
        loss = model(ids(0)) + model(ids(1))
    for layer in model.layers:
        change(layer)
    with pytest.raises(SwapError, match="did not repeat"):
        loss.backward()


@by_recompute
def test_parameters_lent_for_one_call_move_nothing_apart(
    offload: Callable[..., memo.Manager], how: dict[str, Any]
) -> None:
    """Backward would find a layer's own parameters in their place."""

    def step(model: Stack, manager: Any) -> list[torch.Tensor]:
        lent = {name: (0.5 * p.detach()).requires_grad_() for name, p in model.named_parameters(remove_duplicate=True)}
        with manager:
            loss = functional_call(model, lent, (ids(),))
        return list(torch.autograd.grad(loss, list(lent.values())))

    model, reference = stack(), stack()
    manager = offload(model, **how)
    with pytest.warns(RuntimeWarning, match="other parameters than its own"):
        got = step(model, manager)
    assert all(map(torch.equal, got, step(reference, contextlib.nullcontext())))
    assert_equal(train(model, lambda step: model(ids(step)), manager), plain())
    assert manager.stats.bytes_recomputed > 0


class MadeInInferenceMode(Layer):
    """A table that has no version counter."""

    def __init__(self) -> None:
        super().__init__()
        with torch.inference_mode():
            self.register_buffer("table", torch.ones(32))

    def strange(self, x: torch.Tensor) -> torch.Tensor:
        return (x + self.table).sin()


@by_recompute
def test_a_table_made_in_inference_mode(offload: Callable[..., memo.Manager], how: dict[str, Any]) -> None:
    model = stack(make=MadeInInferenceMode)
    manager = offload(model, **how)
    assert_equal(train(model, lambda step: model(ids(step)), manager), plain(lambda: stack(make=MadeInInferenceMode)))
    assert manager.stats.bytes_recomputed > 0


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

    model, reference = stack(make=Finds), stack(make=Finds)
    manager = offload(model, **how)
    with pytest.warns(RuntimeWarning, match="hooks on its modules"):
        assert_equal(train(model, forward(model), manager), train(reference, forward(reference)))


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


@by_recompute
def test_hooks_put_there_in_the_forward_are_called_once(
    offload: Callable[..., memo.Manager], how: dict[str, Any]
) -> None:
    def listens() -> Listens:
        torch.manual_seed(0)
        return Listens(make=Finds)

    model = listens()
    with pytest.warns(RuntimeWarning, match="hooks on its modules"):
        assert_equal(train(model, lambda step: model(ids(step)), offload(model, **how)), plain(listens))


@by_recompute
def test_hooks_put_there_before_backward_are_an_error(
    offload: Callable[..., memo.Manager], how: dict[str, Any]
) -> None:
    """They would be told of a forward that the program never ran."""
    model = stack(make=Finds)
    with offload(model, **how):
        loss = model(ids())
    for layer in model.layers:
        layer.up.register_forward_hook(lambda module, args, output: None)  # type: ignore[union-attr]
    with pytest.raises(ModifiedAfterSave, match="hooks on its modules would be called again"):
        loss.backward()


@by_recompute
def test_what_a_layer_puts_aside_is_of_its_forward(offload: Callable[..., memo.Manager], how: dict[str, Any]) -> None:
    def forward(model: Stack) -> Callable[[int], torch.Tensor]:
        def step(number: int) -> torch.Tensor:
            loss: torch.Tensor = model(ids(number))
            return loss + torch.stack([layer.aside.square().mean() for layer in model.layers]).sum()  # type: ignore[operator, union-attr]

        return step

    model, reference = stack(make=PutsAside), stack(make=PutsAside)
    with pytest.warns(RuntimeWarning, match="its forward changes"):
        assert_equal(train(model, forward(model), offload(model, **how)), train(reference, forward(reference)))


class Rewrites(Layer):
    """Saves a buffer for nothing, changes it in place and saves it again; while the gate is closed it stays the same."""

    def strange(self, x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y.sin()
        y.mul_(1 + self.gate)
        return y.sin()


@by_recompute
def test_a_buffer_saved_again_is_computed_again_as_it_was_then(
    offload: Callable[..., memo.Manager], how: dict[str, Any]
) -> None:
    model = stack(make=Rewrites)
    manager = offload(model, **how)
    assert_equal(train(model, lambda step: model(ids(step)), manager), plain(lambda: stack(make=Rewrites)))
    assert manager.stats.bytes_recomputed > 0


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
