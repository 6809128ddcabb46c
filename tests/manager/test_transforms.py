"""Forwards that torch traces or transforms are as without memo, whether it is around, within, or attached."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import disable_saved_tensors_hooks
from torch.func import functional_call, grad, jacrev, jvp, vjp, vmap

import memo
from memo.swap import SavingHooks

pytestmark = [
    pytest.mark.filterwarnings("ignore:memo.offload. backward ran, and no forward"),
    pytest.mark.filterwarnings("ignore:layers.0 and 2 more ran without hooks.*or was traced"),
]

ALPHAS = [1.0, 0.0, None]
WIDTH = 16

Step = Callable[[nn.Module, torch.Tensor], torch.Tensor]


class Block(nn.Module):
    """A layer."""

    def __init__(self, inner: Callable[[nn.Module, torch.Tensor], torch.Tensor] | None = None) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.down(torch.tanh(self.up(x)))
        return x + (y if self.inner is None else self.inner(self, y))


class Model(nn.Module):
    """Three layers."""

    def __init__(self, make: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.layers = nn.ModuleList([make() for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def given() -> torch.Tensor:
    return torch.randn(4, 8, WIDTH, generator=torch.Generator().manual_seed(1))


def built(make: Callable[[], nn.Module]) -> Model:
    torch.manual_seed(0)
    return Model(make)


def managed(model: nn.Module, alpha: float | None) -> memo.Manager:
    return memo.offload(model, alpha=alpha, host="8MiB", min_bytes=64)


@contextlib.contextmanager
def around(model: nn.Module, alpha: float | None, how: str) -> Iterator[contextlib.AbstractContextManager[Any]]:
    """What each step runs in, with memo entered or attached."""
    manager = managed(model, alpha)
    if how == "attached":
        manager.attach()
    yield manager if how == "entered" else contextlib.nullcontext()
    manager.close()


def flat(found: Any) -> list[torch.Tensor]:
    return [leaf.detach().clone() for leaf in torch.utils._pytree.tree_leaves(found)]


def assert_as_without(
    step: Callable[[nn.Module, torch.Tensor], Any], alpha: float | None, how: str, make: Callable[[], nn.Module] = Block
) -> None:
    """Runs three steps with and without memo."""
    reference, model = built(make), built(make)
    want = [flat(step(reference, given())) for _ in range(3)]
    with around(model, alpha, how) as within:
        for expected in want:
            with within:
                found = flat(step(model, given()))
            assert len(found) == len(expected) > 0
            assert all(map(torch.equal, found, expected))


def trained(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """Output and gradients of one step."""
    model.zero_grad()
    x = x.requires_grad_()
    out = model(x)
    out.square().sum().backward()
    return [out, x.grad, *(parameter.grad for parameter in model.parameters())]


def own(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach() for name, parameter in module.named_parameters()}


def loss_of(model: nn.Module, x: torch.Tensor) -> Callable[[dict[str, torch.Tensor]], torch.Tensor]:
    return lambda given: functional_call(model, given, (x,)).square().sum()


def of_grad(model: nn.Module, x: torch.Tensor) -> Any:
    return grad(loss_of(model, x))(own(model))


def of_vjp(model: nn.Module, x: torch.Tensor) -> Any:
    out, back = vjp(model, x)
    return out, back(torch.ones_like(out))


def of_jacrev(model: nn.Module, x: torch.Tensor) -> Any:
    return jacrev(model)(x[0, 0])


def of_jvp(model: nn.Module, x: torch.Tensor) -> Any:
    return jvp(model, (x,), (torch.ones_like(x),))


def of_vmap(model: nn.Module, x: torch.Tensor) -> Any:
    model.zero_grad()
    vmap(model)(x).square().sum().backward()
    return [parameter.grad for parameter in model.parameters()]


def of_vmap_of_grad(model: nn.Module, x: torch.Tensor) -> Any:
    return vmap(lambda one: grad(loss_of(model, one))(own(model)))(x)


TRANSFORMS = [of_grad, of_vjp, of_jacrev, of_jvp, of_vmap, of_vmap_of_grad]


@pytest.mark.covering(2)
@pytest.mark.parametrize("how", ["attached", "entered"])
@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_transformed_model_is_as_without_memo(transform: Step, alpha: float | None, how: str) -> None:
    assert_as_without(transform, alpha, how)


@pytest.mark.parametrize("alpha", ALPHAS)
def test_a_manager_may_be_entered_within_a_transform(alpha: float | None) -> None:
    model, x = built(Block), given()
    want, manager = of_grad(model, x), managed(model, alpha)

    def loss(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        with manager:
            return loss_of(model, x)(parameters)

    found = grad(loss)(own(model))
    assert all(torch.equal(found[name], want[name]) for name in want)
    manager.close()


def inner_grad(layer: nn.Module, y: torch.Tensor) -> torch.Tensor:
    return grad(lambda z: layer.up(z).tanh().sum())(y)


def inner_vjp(layer: nn.Module, y: torch.Tensor) -> torch.Tensor:
    out, back = vjp(lambda z: layer.up(z).tanh(), y)
    return back(out)[0]


def inner_jacrev(layer: nn.Module, y: torch.Tensor) -> torch.Tensor:
    return y + jacrev(lambda z: layer.up(z).tanh())(y[0, 0]).sum(0)


def inner_vmap(layer: nn.Module, y: torch.Tensor) -> torch.Tensor:
    return vmap(lambda z: layer.down(layer.up(z).tanh()))(y)


@pytest.mark.covering(2)
@pytest.mark.parametrize("how", ["attached", "entered"])
@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("inner", [inner_grad, inner_vjp, inner_jacrev, inner_vmap])
def test_a_layer_may_transform(inner: Step, alpha: float | None, how: str) -> None:
    assert_as_without(trained, alpha, how, lambda: Block(inner))


def of_jit(model: nn.Module, x: torch.Tensor) -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`torch.jit", FutureWarning)  # from torch 2.14 on
        return trained(torch.jit.trace(model, (x.clone(),)), x)


def of_fx(model: nn.Module, x: torch.Tensor) -> Any:
    return trained(torch.fx.symbolic_trace(model), x)


def of_export(model: nn.Module, x: torch.Tensor) -> Any:
    return trained(torch.export.export(model, (x.clone(),)).module(), x)


def of_make_fx(model: nn.Module, x: torch.Tensor) -> Any:
    from torch.fx.experimental.proxy_tensor import make_fx

    return make_fx(model)(x)(x)


@pytest.mark.covering(2)
@pytest.mark.parametrize("how", ["attached", "entered"])
@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("trace", [of_jit, of_fx, of_export, of_make_fx])
@pytest.mark.filterwarnings("ignore:.*torch.jit.trace:DeprecationWarning")
def test_a_traced_model_is_as_without_memo(trace: Step, alpha: float | None, how: str) -> None:
    assert_as_without(trace, alpha, how)


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("how", ["attached", "entered"])
def test_saved_tensors_may_be_mutated_where_torch_allows_it(alpha: float | None, how: str) -> None:
    def step(model: nn.Module, x: torch.Tensor) -> Any:
        with torch.autograd.graph.allow_mutation_on_saved_tensors():
            return trained(model, x)

    def inner(layer: nn.Module, y: torch.Tensor) -> torch.Tensor:
        layer.kept = (
            y  # freed memory used again within the step gets the former tensor's copy, by a fault of torch's own
        )
        return (y * y.exp(), y.zero_())[0]

    assert_as_without(step, alpha, how, lambda: Block(inner))


class Nested(Block):
    """Takes and returns its tensor in what `wrap` makes."""

    def __init__(self, wrap: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.wrap = wrap

    def forward(self, x: Any) -> Any:
        while not isinstance(x, torch.Tensor):
            x = x[0]
        return self.wrap(super().forward(x))


def in_itself(x: torch.Tensor) -> Any:
    found: list[Any] = [x]
    found.append(found)
    return found


def deep(x: torch.Tensor) -> Any:
    found: Any = x
    for _ in range(2000):
        found = [found]
    return found


@pytest.mark.covering(2)
@pytest.mark.parametrize("how", ["attached", "entered"])
@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("wrap", [in_itself, deep])
def test_arguments_and_results_may_be_nested_in_any_way(
    wrap: Callable[[torch.Tensor], Any], alpha: float | None, how: str
) -> None:
    def step(model: nn.Module, x: torch.Tensor) -> Any:
        model.zero_grad()
        out = model(wrap(x))
        while not isinstance(out, torch.Tensor):
            out = out[0]
        out.square().sum().backward()
        return [out, *(parameter.grad for parameter in model.parameters())]

    assert_as_without(step, alpha, how, lambda: Nested(wrap))


@pytest.mark.parametrize("alpha", ALPHAS)
def test_a_compiled_layer_may_transform(alpha: float | None) -> None:
    def make() -> nn.Module:
        block = Block(inner_grad)
        block.compile(backend="aot_eager", fullgraph=True)
        return block

    assert_as_without(trained, alpha, "attached", make)


@pytest.mark.covering(1)
@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize("alpha", ALPHAS)
def test_a_layer_that_is_compiled_in_a_managed_forward_may_transform(alpha: float | None, fullgraph: bool) -> None:
    def make() -> nn.Module:
        torch._dynamo.reset()
        block = Block(inner_grad)
        block.compile(backend="eager", fullgraph=fullgraph)
        return block

    assert_as_without(trained, alpha, "entered", make)


def forbids(module: nn.Module, y: torch.Tensor) -> torch.Tensor:
    with disable_saved_tensors_hooks("mine"):
        return y * y.sin()


@pytest.mark.parametrize("how", ["entered", "attached"])
@pytest.mark.parametrize("alpha", ALPHAS)
def test_a_layer_may_forbid_hooks_by_a_name_imported_before(alpha: float | None, how: str) -> None:
    assert_as_without(trained, alpha, how, lambda: Block(forbids))


@pytest.mark.parametrize("how", ["entered", "attached"])
@pytest.mark.parametrize("alpha", ALPHAS)
def test_hooks_may_be_forbidden_around_a_managed_forward(alpha: float | None, how: str) -> None:
    model = built(Block)
    want = trained(built(Block), given())
    with around(model, alpha, how) as context:
        with disable_saved_tensors_hooks("mine"), context:
            out = model(given())
        out.square().sum().backward()
    assert all(
        map(torch.equal, [parameter.grad for parameter in model.parameters()], want[-len([*model.parameters()]) :])
    )
    assert no_hooks()


def no_hooks() -> bool:
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is None


def test_contexts_that_end_in_another_order_leave_no_hooks() -> None:
    models = [built(Block) for _ in range(2)]
    first, second = (managed(model, 0.0) for model in models)
    first.__enter__()
    second.__enter__()
    models[0](given()).sum().backward()
    first.__exit__(None, None, None)
    second.__exit__(None, None, None)
    assert no_hooks()
    with contextlib.ExitStack() as stack:
        with first:
            stack.enter_context(disable_saved_tensors_hooks("mine"))
        assert no_hooks()
    assert no_hooks()
    first.close()
    second.close()


def test_hooks_of_the_program_stay_where_a_managers_are_taken_off_below_them() -> None:
    model = built(Block)
    manager = managed(model, 0.0)
    packed = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor)
        return tensor

    manager.__enter__()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        manager.__exit__(None, None, None)
        given().requires_grad_().sin()
    assert len(packed) == 1
    assert no_hooks()
    manager.close()


def test_torch_forbids_hooks_as_before() -> None:
    with managed(built(Block), 1.0) as manager:
        pass
    manager.close()
    with (
        torch.autograd.graph.save_on_cpu(),
        pytest.raises(RuntimeError, match="mine"),
        disable_saved_tensors_hooks("mine"),
    ):
        pass
    with (
        disable_saved_tensors_hooks("mine"),
        pytest.raises(RuntimeError, match="mine"),
        torch.autograd.graph.save_on_cpu(),
    ):
        pass
    assert no_hooks()


def test_hooks_stand_aside_in_threads_to_which_torch_has_carried_them() -> None:
    def pack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    found = []

    def elsewhere() -> None:
        torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)  # as torch does in a device's thread
        x = torch.ones(3)
        found.append(torch.equal(grad(lambda y: y.sin().sum())(x), x.cos()))
        found.append(not no_hooks())
        torch._C._autograd._pop_saved_tensors_default_hooks()

    hooks = SavingHooks(pack, unpack)
    hooks.install()
    try:
        thread = threading.Thread(target=elsewhere)
        thread.start()
        thread.join()
    finally:
        hooks.remove()
    assert found == [True, True]
    assert no_hooks()
