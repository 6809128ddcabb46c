"""What a program changes between forward and backward: of tensors that a replay reads it is an error or makes no difference;
of everything else it is nobody's business. Gradients are those of a run without memo."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.distributed as dist
from small_models import Block, Stack, assert_equal, gradients, ids, plain, stack, train
from strange_layers import Layer, PutsAside
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.func import functional_call, vmap
from torch.nn import functional as F
from torch.utils._python_dispatch import _get_current_dispatch_mode

from memo.errors import ModifiedAfterSave, SwapError
from memo.swap.recompute.recorded_call import RecordedCall
from memo.swap.token_levels import Level

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import memo

RECOMPUTES = [
    {"alpha": 0.25},
    {"alpha": (0.25, 0.5, 0.25)},
    {"alpha": None, "levels": dict.fromkeys(range(3), Level.SAVE_INPUT)},
]
by_recompute = pytest.mark.parametrize("how", RECOMPUTES, ids=["tokens", "matmuls", "whole"])


def on_ids(model: Stack) -> Callable[[int], torch.Tensor]:
    return lambda step: model(ids(step))


def trains_equally(
    offload: Callable[..., memo.Manager],
    how: dict[str, Any],
    make: Callable[[], Stack],
    forward: Callable[[Stack], Callable[[int], torch.Tensor]] = on_ids,
) -> None:
    """Trains with memo and without it, to the same bits; something is replayed."""
    model, reference = make(), make()
    manager = offload(model, **how)
    assert_equal(train(model, forward(model), manager), train(reference, forward(reference)))
    assert manager.stats.bytes_recomputed > 0


class Finds(nn.Module):
    """What it does depends on what it holds: attributes, numbers in lists, parts of a table, constants, tensors."""

    elsewhere = False

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)
        self.norm = nn.LayerNorm(32)
        self.act: nn.Module = nn.GELU()
        self.scale = 1.0
        self.register_buffer("table", torch.linspace(0.5, 2.0, 100))
        self.settings: dict[str, Any] = {
            "scale": 1.0, "act": F.gelu, "shift": torch.zeros(64), "over": 3, "start": 0, "constant": 0.5, "which": 0
        }  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if Finds.elsewhere:
            x = x.exp().log()
        choice = self.settings
        y = choice["act"](self.up(self.norm(x)) + choice["shift"]) * choice["scale"]
        y = y * self.table[choice["start"] : choice["start"] + 64]  # type: ignore[index]
        squares = y.unflatten(-1, (8, 8))
        y = (squares * squares.sum([choice["over"]]).unsqueeze(-1)).flatten(2)
        y = (y.sin(), y.cos())[choice["which"]] * torch.tensor(choice["constant"])
        return x + self.scale * self.down(self.act(torch.tanh(y + choice["shift"].double()).float()))


def sets(name: str, value: Any) -> Callable[[Any], None]:
    return lambda layer: layer.settings.update({name: value})


def changes_an_attribute(layer: Any) -> None:
    layer.scale = 2.0


def changes_the_mode(layer: Any) -> None:
    layer.eval()


def changes_a_module(layer: Any) -> None:
    layer.act = nn.ReLU()


def changes_a_modules_attribute(layer: Any) -> None:
    layer.act.approximate = "tanh"


def changes_its_class(layer: Any) -> None:
    Finds.elsewhere = True


def changes_a_parameter_for_another(layer: Any) -> None:
    layer.up.bias = nn.Parameter(torch.ones(64))


def changes_a_buffer_for_another(layer: Any) -> None:
    layer.table = torch.ones(100)


def puts_a_hook(layer: Any) -> None:
    layer.up.register_forward_hook(lambda module, args, output: output + 1)


def freezes_a_parameter(layer: Any) -> None:
    layer.up.weight.requires_grad_(False)


def same(got: list[torch.Tensor | None], want: list[torch.Tensor | None]) -> bool:
    return all(
        theirs is None if ours is None else theirs is not None and torch.equal(ours, theirs)
        for ours, theirs in zip(got, want, strict=True)
    )


NOT_READ = {
    "an attribute": changes_an_attribute,
    "the mode": changes_the_mode,
    "a module": changes_a_module,
    "a module's attribute": changes_a_modules_attribute,
    "its class": changes_its_class,
    "a parameter for another": changes_a_parameter_for_another,
    "a buffer for another": changes_a_buffer_for_another,
    "a hook": puts_a_hook,
    "a parameter frozen": freezes_a_parameter,
    "a number": sets("scale", 2.0),
    "a function": sets("act", F.silu),
    "another tensor": sets("shift", torch.ones(64)),
    "a dimension": sets("over", 2),
    "a part": sets("start", 7),
    "a constant": sets("constant", 2.0),
    "a choice of results": sets("which", 1),
}


def between(model: Stack, manager: Any, change: Callable[[Any], None], *, autocast: bool = False) -> list[Any]:
    """Gradients of a step in which something changes between forward and backward; twice with autocast, for its cache."""
    with manager, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        loss = model(ids(0)) + model(ids(1))
    for layer in model.layers:
        change(layer)
    try:
        loss.backward()
    finally:
        Finds.elsewhere = False
    return gradients(model)


@by_recompute
@pytest.mark.parametrize("autocast", [False, True], ids=["", "autocast"])
@pytest.mark.parametrize("what", NOT_READ)
def test_what_no_replay_reads_may_change_before_backward(
    offload: Callable[..., memo.Manager], what: str, autocast: bool, how: dict[str, Any]
) -> None:
    model, reference = stack(make=Finds), stack(make=Finds)
    manager = offload(model, **how)
    got = between(model, manager, NOT_READ[what], autocast=autocast)
    want = between(reference, contextlib.nullcontext(), NOT_READ[what], autocast=autocast)
    assert manager.stats.bytes_recomputed > 0
    assert same(got, want)


def adds_to_a_bias(layer: Any) -> None:
    """Autograd does not save a bias, so it would not notice."""
    with torch.no_grad():
        layer.up.bias.add_(1.0)


def adds_to_a_weight(layer: Any) -> None:
    with torch.no_grad():
        layer.up.weight.add_(1.0)


def adds_to_a_norm(layer: Any) -> None:
    with torch.no_grad():
        layer.norm.bias.add_(1.0)


def adds_to_a_buffer(layer: Any) -> None:
    layer.table.add_(1.0)


def adds_to_a_tensor_that_it_finds(layer: Any) -> None:
    layer.settings["shift"].add_(1.0)


def gives_a_parameter_other_memory(layer: Any) -> None:
    layer.up.bias.data = torch.ones(64)


READ = [
    adds_to_a_bias, adds_to_a_weight, adds_to_a_norm, adds_to_a_buffer, adds_to_a_tensor_that_it_finds,
    gives_a_parameter_other_memory,
]  # fmt: skip


@by_recompute
@pytest.mark.parametrize("change", READ)
def test_what_a_replay_reads_must_not_change_before_backward(
    offload: Callable[..., memo.Manager], change: Callable[[Any], None], how: dict[str, Any]
) -> None:
    """Or the gradient is right all the same."""
    model, reference = stack(make=Finds), stack(make=Finds)
    manager = offload(model, **how)
    try:
        got = between(model, manager, change)
    except ModifiedAfterSave as error:
        assert "in place" in str(error) or "optimizer" in str(error)  # noqa: PT017
        return
    except SwapError as error:
        assert "replaced between forward and backward" in str(error)  # noqa: PT017
        return
    want = between(reference, contextlib.nullcontext(), change)
    assert same(got, want)


@pytest.mark.parametrize("change", [adds_to_a_bias, adds_to_a_norm, adds_to_a_tensor_that_it_finds])
def test_the_error_names_what_to_do(offload: Callable[..., memo.Manager], change: Callable[[Any], None]) -> None:
    model = stack(make=Finds)
    manager = offload(model, alpha=0.0)
    with pytest.raises(ModifiedAfterSave, match="changed in place after it was saved"):
        between(model, manager, change)


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Split(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))  # type: ignore[no-any-return]


@pytest.mark.usefixtures("one_rank")
def test_a_sharded_parameter_must_not_change_before_backward(offload: Callable[..., memo.Manager]) -> None:
    """Its local part, which the replay reads, does not count changes of the whole."""
    model = stack(make=Split)
    mesh = init_device_mesh("cpu", (1,))
    for layer in model.layers:
        parallelize_module(layer, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    manager = offload(model, alpha=0.0)
    train(model, lambda step: model(ids(step)), manager)
    assert manager.stats.bytes_recomputed > 0

    def adds(layer: Any) -> None:
        with torch.no_grad():
            layer.up.bias.add_(1.0)

    with pytest.raises(ModifiedAfterSave):
        between(model, manager, adds)


class Rotated(nn.Module):
    """Is given a table over the tokens, and finds a tensor that no argument names."""

    found = torch.zeros(())

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(32, 2)

    def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return self.block(x * table.detach() * Rotated.found.detach())  # type: ignore[no-any-return]


class RotatedStack(Stack):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        Rotated.found = torch.full((2, 1, 32), 1.0 + float(ids[0, 0]))
        self.table = torch.linspace(0.5, 2.0, ids.size(1)).view(1, -1, 1).repeat(1, 1, 32)
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, self.table)
        return x.square().mean()


def rotated() -> RotatedStack:
    torch.manual_seed(0)
    return RotatedStack(make=Rotated)


@by_recompute
def test_each_graph_finds_the_tensors_of_its_own_forward(
    offload: Callable[..., memo.Manager], how: dict[str, Any]
) -> None:
    def steps(model: RotatedStack, manager: Any) -> list[Any]:
        losses = []
        for step in range(3):
            with manager:
                losses.append(model(ids(step)))
        losses[1].backward()
        losses[0].backward()
        losses[2].backward()
        return gradients(model)

    model = rotated()
    manager = offload(model, **how)
    got = steps(model, manager)
    assert same(got, steps(rotated(), contextlib.nullcontext()))
    assert manager.stats.bytes_recomputed > 0


@by_recompute
@pytest.mark.parametrize("which", ["argument", "found"])
def test_a_tensor_that_a_layer_is_given_or_finds_must_not_be_written_into_before_backward(
    offload: Callable[..., memo.Manager], which: str, how: dict[str, Any]
) -> None:
    model, reference = rotated(), rotated()
    manager = offload(model, **how)
    with manager:
        loss = model(ids())
    (model.table if which == "argument" else Rotated.found).add_(1.0)
    try:
        loss.backward()
    except ModifiedAfterSave:
        return
    want = reference(ids())
    (reference.table if which == "argument" else Rotated.found).add_(1.0)
    want.backward()
    assert same(gradients(model), gradients(reference))


@by_recompute
def test_parameters_lent_for_one_call(offload: Callable[..., memo.Manager], how: dict[str, Any]) -> None:
    """The replay reads those, and not the layer's own, which are in their place again when backward runs."""

    def step(model: Stack, manager: Any) -> list[torch.Tensor]:
        lent = {name: (0.5 * p.detach()).requires_grad_() for name, p in model.named_parameters(remove_duplicate=True)}
        with manager:
            loss = functional_call(model, lent, (ids(),))
        return list(torch.autograd.grad(loss, list(lent.values())))

    model, reference = stack(), stack()
    manager = offload(model, **how)
    got = step(model, manager)
    assert manager.stats.bytes_recomputed > 0
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
def test_hooks_put_there_before_backward_hear_nothing(
    offload: Callable[..., memo.Manager], how: dict[str, Any]
) -> None:
    model = stack(make=Finds)
    manager = offload(model, **how)
    heard: list[torch.Tensor] = []

    def listen(layer: Any) -> None:
        layer.up.register_forward_hook(lambda module, args, output: heard.append(output))

    got = between(model, manager, listen)
    assert same(got, between(stack(make=Finds), contextlib.nullcontext(), listen))
    assert heard == []
    assert manager.stats.bytes_recomputed > 0


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


class TwoBiases(nn.Module):
    """Two parameters in one memory, as sharding and flattening optimizers make them."""

    def __init__(self) -> None:
        super().__init__()
        memory = torch.randn(64)
        self.up, self.down = nn.Linear(32, 32), nn.Linear(32, 32)
        self.first, self.second = nn.Parameter(torch.empty(32)), nn.Parameter(torch.empty(32))
        self.first.data, self.second.data = memory[:32], memory[32:]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(((self.up(x) + self.first) * 2 + self.second).sin())


def through_two_layers(offload: Callable[..., memo.Manager]) -> tuple[nn.Module, memo.Manager, torch.Tensor]:
    """The layers' model, its manager, and the result of a forward."""
    model = nn.Module()
    model.layers = nn.ModuleList([TwoBiases(), TwoBiases()])
    manager = offload(model, alpha=0.0, min_bytes=1)
    x = torch.randn(2, 32, 32, requires_grad=True)
    with manager:
        for layer in model.layers:
            x = layer(x)
    return model, manager, x.sum()


@pytest.mark.parametrize("name", ["first", "second"])
def test_change_of_a_parameter_in_shared_memory_is_an_error(offload: Callable[..., memo.Manager], name: str) -> None:
    model, _, total = through_two_layers(offload)
    with torch.no_grad():
        getattr(model.layers[0], name).add_(1)  # type: ignore[index]
    with pytest.raises(ModifiedAfterSave):
        total.backward()


def test_precision_set_by_backend(offload: Callable[..., memo.Manager]) -> None:
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        _, manager, total = through_two_layers(offload)
        torch.backends.cuda.matmul.fp32_precision = "ieee"
        total.backward()
        assert manager.stats.bytes_recomputed > 0
        assert torch.backends.cuda.matmul.fp32_precision == "ieee"
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


class WritesThroughData(torch.optim.Optimizer):
    """An optimizer of another library: nothing counts what it does."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data.sub_(0.1 * parameter.grad)


UNCOUNTED: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "fused Adam": lambda parameters: torch.optim.Adam(parameters, fused=True),
    "fused SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, fused=True),
    "another library's": WritesThroughData,
}


def steps_between(model: Stack, manager: Any, make: Callable[[Any], torch.optim.Optimizer]) -> list[Any]:
    """Gradients of a step with an optimizer's step between its forward and its backward."""
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer = make(model.parameters())
    with manager:
        loss = model(ids())
    optimizer.step()
    model.zero_grad()
    loss.backward()
    return gradients(model)


@by_recompute
@pytest.mark.parametrize("optimizer", UNCOUNTED)
def test_a_step_that_no_counter_shows_must_not_come_before_backward(
    offload: Callable[..., memo.Manager], optimizer: str, how: dict[str, Any]
) -> None:
    """Autograd itself would not notice, and mix the weights of two steps: without memo, and with it at alpha 1."""
    make = UNCOUNTED[optimizer]
    model = stack()
    manager = offload(model, **how)
    with pytest.raises(ModifiedAfterSave, match="an optimizer's step between forward and backward"):
        steps_between(model, manager, make)
    moved, reference = stack(), stack()
    got = steps_between(moved, offload(moved, alpha=1.0), make)
    assert same(got, steps_between(reference, contextlib.nullcontext(), make))


@by_recompute
@pytest.mark.parametrize("optimizer", UNCOUNTED)
def test_steps_after_backward_and_of_other_parameters_are_nobodys_business(
    offload: Callable[..., memo.Manager], optimizer: str, how: dict[str, Any]
) -> None:
    make = UNCOUNTED[optimizer]

    def steps(model: Stack, manager: Any) -> list[Any]:
        mine, other = make(model.parameters()), nn.Linear(4, 4)
        for _ in range(3):
            for_other = make(other.parameters())
            other.weight.grad, other.bias.grad = torch.ones(4, 4), torch.ones(4)
            with manager:
                loss = model(ids())
            for_other.step()
            loss.backward()
            mine.step()
            mine.zero_grad()
        return [parameter.detach().clone() for parameter in model.parameters()]

    model = stack()
    manager = offload(model, **how)
    assert same(steps(model, manager), steps(stack(), contextlib.nullcontext()))
    assert manager.stats.bytes_recomputed > 0


class Widens(nn.Module):
    """Autograd does not save its input: it widens it first, as norms of half precision do."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.layer_norm(x.double(), (32,)).float()
        return self.down(F.gelu(self.up(x)))  # type: ignore[no-any-return]


class AddsInPlace(Stack):
    """Changes what its layers were given, which is no error: nothing in the graph needs it."""

    from_call = 0
    calls = 0

    def __init__(self) -> None:
        super().__init__(make=Widens)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = self.embed(ids)
        for layer in self.layers:
            if self.calls > self.from_call:
                x += layer(x)
            else:
                x = x + layer(x)
        return x.square().mean()


def adds_in_place() -> AddsInPlace:
    torch.manual_seed(0)
    return AddsInPlace()


@by_recompute
@pytest.mark.parametrize("parts", [1, 2])
def test_an_input_that_autograd_does_not_save_may_change(
    offload: Callable[..., memo.Manager], parts: int, how: dict[str, Any]
) -> None:
    """Also in the second forward of the first step, whose layers are known by then."""

    def forward(model: Stack) -> Callable[[int], torch.Tensor]:
        return lambda step: torch.stack([model(ids(parts * step + part)) for part in range(parts)]).sum()

    model, reference = adds_in_place(), adds_in_place()
    manager = offload(model, **how)
    assert_equal(train(model, forward(model), manager), train(reference, forward(reference)))
    assert manager.stats.bytes_recomputed > 0
    assert not manager._tokenwise.refused


@pytest.mark.parametrize("how", [{"alpha": 0.0}, RECOMPUTES[2]], ids=["attention", "whole"])
def test_an_input_that_changes_later_than_in_the_first_calls_is_an_error_that_says_what_to_do(
    offload: Callable[..., memo.Manager], how: dict[str, Any]
) -> None:
    model = adds_in_place()
    model.from_call = 3
    manager = offload(model, **how)
    train(model, lambda step: model(ids(step)), manager)
    with manager:
        loss = model(ids(3))
    with pytest.raises(ModifiedAfterSave, match=r'move all that this layer saves: levels=\{"layers.\d": 1.0\}'):
        loss.backward()


@by_recompute
def test_an_input_that_does_not_change_is_copied_in_first_calls_alone(
    offload: Callable[..., memo.Manager], how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[bool] = []
    plain_copy = RecordedCall._copied

    def watch(self: RecordedCall, tensor: torch.Tensor) -> torch.Tensor:
        copied.append(True)
        return plain_copy(self, tensor)

    monkeypatch.setattr(RecordedCall, "_copied", watch)
    model = adds_in_place()
    model.from_call = 1000
    manager = offload(model, **how)
    train(model, lambda step: model(ids(step)), manager, steps=1)
    first = len(copied)
    train(model, lambda step: model(ids(step)), manager)
    assert len(copied) == first


class Sharded(Widens):
    """Is given a DTensor."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = F.layer_norm(x.to_local().double(), (32,)).float()  # type: ignore[operator]
        y = self.down(F.gelu(self.up(wide)))
        return DTensor.from_local(y, x.device_mesh, x.placements)  # type: ignore[attr-defined, no-any-return]


class AddsSharded(AddsInPlace):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = DTensor.from_local(self.embed(ids), self.mesh, [Replicate()])  # type: ignore[arg-type]
        for layer in self.layers:
            if self.calls > self.from_call:
                x += layer(x)
            else:
                x = x + layer(x)
        return x.to_local().square().mean()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("from_call", [0, 3])
@pytest.mark.parametrize("how", RECOMPUTES[1:], ids=["matmuls", "whole"])
def test_a_sharded_input_that_changes(
    offload: Callable[..., memo.Manager], from_call: int, how: dict[str, Any]
) -> None:
    """Its local part, which the replay reads, does not count changes of the whole."""

    def make() -> AddsSharded:
        torch.manual_seed(0)
        model = AddsSharded()
        model.layers = nn.ModuleList([Sharded() for _ in range(3)])
        model.mesh = init_device_mesh("cpu", (1,))  # type: ignore[assignment]
        model.from_call = from_call
        return model

    model, reference = make(), make()
    manager = offload(model, **how)
    got = train(model, lambda step: model(ids(step)), manager)
    assert_equal(got, train(reference, lambda step: reference(ids(step))))
    assert manager.stats.bytes_recomputed > 0
    if from_call:
        with manager:
            loss = model(ids(3))
        try:
            loss.backward()
        except ModifiedAfterSave:
            return
        reference(ids(3)).backward()  # token ranges keep parts of the input in memory of their own
        assert same(gradients(model), gradients(reference))


def adds_to_a_weight_through_data(layer: Any) -> None:
    layer.up.weight.data.add_(1.0)


def adds_to_a_bias_through_numpy(layer: Any) -> None:
    layer.up.bias.detach().numpy()[0] += 1.0


def adds_to_a_buffer_through_data(layer: Any) -> None:
    layer.table.data.add_(1.0)


@by_recompute
@pytest.mark.parametrize(
    "change", [adds_to_a_weight_through_data, adds_to_a_bias_through_numpy, adds_to_a_buffer_through_data]
)
def test_verify_sees_changes_that_nothing_counts(
    offload: Callable[..., memo.Manager], change: Callable[[Any], None], how: dict[str, Any]
) -> None:
    """Of what a replay reads; of the rest it is right, as autograd keeps it."""
    model, reference = stack(make=Finds), stack(make=Finds)
    manager = offload(model, verify=True, **how)
    try:
        got = between(model, manager, change)
    except ModifiedAfterSave as error:
        assert "nothing counted it" in str(error)  # noqa: PT017
        return
    assert same(got, between(reference, contextlib.nullcontext(), change))


@by_recompute
def test_verify_sees_a_weight_that_changes(offload: Callable[..., memo.Manager], how: dict[str, Any]) -> None:
    model = stack()
    manager = offload(model, verify=True, **how)
    with manager:
        loss = model(ids())
    for parameter in model.layers.parameters():
        parameter.data.add_(1.0)
    with pytest.raises(ModifiedAfterSave, match="nothing counted it"):
        loss.backward()


@by_recompute
def test_verify_finds_nothing_where_nothing_changes(offload: Callable[..., memo.Manager], how: dict[str, Any]) -> None:
    model = stack()
    manager = offload(model, verify=True, **how)
    assert_equal(train(model, lambda step: model(ids(step)), manager), plain())
    assert manager.stats.bytes_recomputed > 0


class GivenSharded(nn.Module):
    """Is given a table as a DTensor, which autograd does not save."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor, table: Any) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(x.sin() + table.to_local())))  # type: ignore[no-any-return]


class GivesSharded(Stack):
    def __init__(self) -> None:
        super().__init__(make=GivenSharded)
        self.table = DTensor.from_local(torch.ones(32), init_device_mesh("cpu", (1,)), [Replicate()])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x, self.table)
        return x.square().mean()


@pytest.mark.usefixtures("one_rank")
@by_recompute
def test_a_sharded_argument_must_not_change_before_backward(
    offload: Callable[..., memo.Manager], how: dict[str, Any]
) -> None:
    torch.manual_seed(0)
    model = GivesSharded()
    manager = offload(model, **how)
    train(model, lambda step: model(ids(step)), manager)
    assert manager.stats.bytes_recomputed > 0
    with manager:
        loss = model(ids())
    model.table.add_(1.0)
    with pytest.raises(ModifiedAfterSave):
        loss.backward()
