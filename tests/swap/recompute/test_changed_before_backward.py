"""What a program changes between forward and backward: of tensors that a replay reads it is an error or makes no difference;
of everything else it is nobody's business. Gradients are those of a run without memo."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import pytest
import torch
from changed_layers import Finds, between, by_recompute, same
from small_models import Block, Stack, assert_equal, gradients, ids, plain, stack, train
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

import memo
from memo.errors import ModifiedAfterSave, SwapError

if TYPE_CHECKING:
    from collections.abc import Callable


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


@pytest.mark.covering(1)
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


@pytest.mark.parametrize("change", [adds_to_a_bias, adds_to_a_norm])
def test_the_error_names_what_to_do(offload: Callable[..., memo.Manager], change: Callable[[Any], None]) -> None:
    model = stack(make=Finds)
    manager = offload(model, alpha=0.0)
    with pytest.raises(ModifiedAfterSave, match="changed in place after it was saved"):
        between(model, manager, change)


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


SETTINGS: dict[str, tuple[Callable[[], Any], Callable[[Any], object], Any]] = {
    "threads": (torch.get_num_threads, torch.set_num_threads, 3),
    "deterministic": (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True),
    "tf32 of convolutions": (
        lambda: torch.backends.cudnn.allow_tf32,
        lambda value: setattr(torch.backends.cudnn, "allow_tf32", value),
        False,
    ),
    "sums in bfloat16": (
        lambda: torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction,
        lambda value: setattr(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", value),
        False,
    ),
    "denormals": (lambda: bool(torch.tensor(1e-39).mul(1) == 0), torch.set_flush_denormal, True),
    "mkldnn": (torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled, False),
    "nnpack": (torch._C._get_nnpack_enabled, torch._C._set_nnpack_enabled, False),
}


class Told(nn.Module):
    """Saves what `tell` says in its forward and in its replay."""

    def __init__(self, tell: Callable[[], object]) -> None:
        super().__init__()
        self.linear, self.said = nn.Linear(32, 32), []  # type: ignore[var-annotated]
        self.tell = tell

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        @memo.recomputable
        def noted(h: torch.Tensor) -> torch.Tensor:
            self.said.append(self.tell())
            return h.sin()

        return x + noted(self.linear(x)).cos()


@pytest.mark.parametrize("name", SETTINGS)
def test_a_replay_runs_under_the_settings_of_its_forward(name: str) -> None:
    read, write, value = SETTINGS[name]
    before = read()
    model = nn.Sequential(*(Told(read) for _ in range(3)))
    manager = memo.offload(model, layers=[*model], alpha=0.0, host="4MiB", min_bytes=1)
    try:
        for _ in range(2):
            for layer in model:
                layer.said.clear()
            write(value)
            with manager:
                loss = model(torch.randn(2, 32, 32)).sum()
            write(before)
            forwards = [len(layer.said) for layer in model]
            loss.backward()
            assert read() == before
    finally:
        write(before)
        manager.close()
    assert [said for layer in model for said in layer.said] == [value] * sum(len(layer.said) for layer in model)
    assert sum(len(layer.said) for layer in model) > sum(forwards)


class Coarse(TorchDispatchMode):
    """Rounds what sin gives."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **kwargs or {})
        return out.bfloat16().float() if func is torch.ops.aten.sin.default else out


@pytest.mark.parametrize("alpha", [0.5, 0.0])
@pytest.mark.parametrize("around", ["forward", "backward"])
def test_a_replay_runs_under_the_dispatch_modes_of_its_forward(around: str, alpha: float) -> None:
    def trained(managed: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*(Told(lambda: None) for _ in range(3)))
        manager = memo.offload(model, layers=[*model], alpha=alpha, host="4MiB", min_bytes=1) if managed else None
        for _ in range(2):
            model.zero_grad()
            with manager or contextlib.nullcontext(), Coarse() if around == "forward" else contextlib.nullcontext():
                loss = model(torch.randn(2, 64, 32)).sum()
            with Coarse() if around == "backward" else contextlib.nullcontext():
                loss.backward()
        if manager is not None:
            assert manager.stats.bytes_recomputed > 0
            manager.close()
        return [parameter.grad for parameter in model.parameters()]  # type: ignore[misc]

    assert all(map(torch.equal, trained(True), trained(False)))


def test_a_replay_leaves_precisions_as_the_program_has_set_them() -> None:
    """torch tells what holds, and not whether it is inherited."""
    model = nn.Sequential(*(Told(lambda: None) for _ in range(3)))
    manager = memo.offload(model, layers=[*model], alpha=0.0, host="4MiB", min_bytes=1)
    try:
        torch.backends.fp32_precision = "tf32"
        with manager:
            loss = model(torch.randn(2, 32, 32)).sum()
        torch.backends.fp32_precision = "none"
        loss.backward()
        torch.backends.fp32_precision = "tf32"
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
        assert torch.backends.mkldnn.matmul.fp32_precision == "tf32"  # type: ignore[attr-defined]
    finally:
        torch.backends.fp32_precision = "none"
        manager.close()
    assert torch.get_float32_matmul_precision() == "highest"


class Shifted(nn.Module):
    """Reads an argument that autograd need not save, or the statistics that its own batch norm writes into later."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(32, 32), nn.BatchNorm1d(32, momentum=0.0)

    def forward(self, x: torch.Tensor, shift: torch.Tensor | None = None) -> torch.Tensor:
        h = self.linear(x).sin()
        if shift is not None:
            return x + (h + shift).cos().sin()
        read = (h - self.norm.running_mean).tanh()
        return x + (read * self.norm(h.transpose(1, 2)).transpose(1, 2)).cos()


@pytest.mark.parametrize("alpha", [0.5, 0.0])
@pytest.mark.parametrize("what", ["an inference tensor", "statistics"])
def test_what_changes_without_a_count_is_not_read_again(what: str, alpha: float) -> None:
    def trained(managed: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.ModuleList(Shifted() for _ in range(3))
        manager = memo.offload(model, layers=[*model], alpha=alpha, host="4MiB", min_bytes=1) if managed else None
        found = []
        with torch.inference_mode():
            shift = torch.ones(2, 32, 32)
        for _ in range(3):
            model.zero_grad()
            with manager or contextlib.nullcontext():
                x = torch.randn(2, 32, 32)
                for layer in model:
                    x = layer(x, shift) if what == "an inference tensor" else layer(x)
            with torch.inference_mode():
                shift.add_(1)
            x.sum().backward()
            found += [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
            for layer in model:
                layer.norm.momentum = 0.3  # type: ignore[union-attr, assignment]
        if manager is not None:
            manager.close()
        return found

    assert all(map(torch.equal, trained(True), trained(False)))


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


class ReadsAliases(nn.Module):
    """Reads another argument by `.data`, once or twice, and leaves the last of these to the program."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.linear, self.times = nn.Linear(32, 32), times

    def forward(self, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        for _ in range(self.times):
            self.alias = other.data
            y = y + self.alias
            if self.times > 1:
                y = y + other.data
        return x + y.sin()


@pytest.mark.parametrize("times", [1, 2])
def test_a_change_of_an_alias_that_the_layer_has_made_is_an_error(times: int) -> None:
    layers = nn.ModuleList([ReadsAliases(times) for _ in range(3)])
    manager = memo.offload(layers, layers=[*layers], alpha=0.0, host="4MiB", min_bytes=1)
    x, other = torch.randn(2, 16, 32), torch.randn(2, 16, 32)
    with manager:
        for layer in layers:
            x = layer(x, other)
    for layer in layers:
        layer.alias.add_(1)
    with pytest.raises(ModifiedAfterSave, match="another tensor in its memory"):
        x.sum().backward()
    manager.close()
