"""torch.utils.checkpoint around managed layers is replaced: the same gradients, and the bytes of a model without it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import save_on_cpu
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts

import memo

LAYERS, WIDTH = 3, 32


class Block(nn.Module):
    """Layer that counts its forwards."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x + self.down(torch.tanh(self.up(x)))  # type: ignore[no-any-return]


class InPart(Block):
    """Layer that checkpoints a part of itself."""

    in_closure = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        function = (lambda hidden: self._first(hidden)) if self.in_closure else self._first
        return x + self.down(checkpoint(function, x, use_reentrant=False))  # type: ignore[no-any-return]

    def _first(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return torch.tanh(self.up(x))


class Bare(Block):
    """The same without parameters."""

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + checkpoint(lambda: self._first(x), use_reentrant=False)  # type: ignore[no-any-return]

    def _first(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return torch.tanh(x).sin()


class Within(Block):
    """Layer whose forward is a checkpoint of all of it, within hooks for saved tensors of its own."""

    hooks: Callable[[], AbstractContextManager[None]] = nullcontext

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.hooks():
            return checkpoint(super().forward, x, use_reentrant=False)  # type: ignore[no-any-return]


class Stack(nn.Module):
    """Layers, called as `how` says, and a head."""

    def __init__(self, how: str, kind: type[Block] = Block) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(kind() for _ in range(LAYERS))
        self.head = Block()
        self.how = how
        if how == "wrapper":
            for number, layer in enumerate(self.layers):
                self.layers[number] = checkpoint_wrapper(layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = self._call(layer, x)
        return self.head(x)  # type: ignore[no-any-return]

    def _call(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor
        if self.how == "reentrant":
            result = checkpoint(layer, x, use_reentrant=True)
        elif self.how == "closure":
            result = checkpoint(lambda hidden: layer(hidden), x, use_reentrant=False)
        elif self.how == "argument":
            result = checkpoint(lambda module, hidden: module(hidden), layer, x, use_reentrant=False)
        elif self.how == "selective, by a function":
            options = [torch.ops.aten.addmm.default]
            result = checkpoint(
                layer, x, use_reentrant=False, context_fn=lambda: create_selective_checkpoint_contexts(options)
            )
        elif self.how == "selective":
            contexts = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
            result = checkpoint(layer.__call__, x, use_reentrant=False, context_fn=contexts)
        else:
            result = layer(x)
        return result


class InSegments(Stack):
    """Layers in two checkpoints of several each."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(checkpoint_sequential(list(self.layers), 2, x, use_reentrant=False))  # type: ignore[no-any-return]


def _trained(model: nn.Module, manager: memo.Manager | None = None) -> list[torch.Tensor]:
    for step in range(2):
        model.zero_grad()
        torch.manual_seed(step)
        with nullcontext() if manager is None else manager:
            loss = model(torch.randn(64, WIDTH, requires_grad=True)).sum()
        loss.backward()
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def _blocks(model: nn.Module) -> list[Block]:
    return [module for module in model.modules() if isinstance(module, Block)]


def _made(how: str) -> nn.Module:
    if how == "within":
        return Stack(how, Within)
    return InSegments(how) if how == "segments" else Stack(how)


@pytest.mark.covering(1)
@pytest.mark.parametrize("alpha", [0.0, 1.0])
@pytest.mark.parametrize(
    "how", ["closure", "argument", "selective", "selective, by a function", "wrapper", "within", "segments"]
)
def test_layers_are_managed_as_without_their_checkpoints(how: str, alpha: float) -> None:
    plain, model = Stack("plain"), _made(how)
    moved = []
    wanted = _trained(plain)
    for each in (plain, model):
        manager = memo.offload(each, alpha=alpha, host="8MiB", min_bytes=64)
        for block in _blocks(each):
            block.calls = 0
        got = _trained(each, manager)
        assert len(got) == len(wanted)
        assert all(map(torch.equal, got, wanted))
        assert all(block.calls == 2 for block in _blocks(each))
        report = manager.report()
        moved.append(report.tiers[-1].moved_bytes)
        assert report.replaced == (LAYERS if each is model else 0)
        assert not report.unseen
        manager.close()
    assert moved[0] == moved[1] > 0
    assert f"in place of the program's activation checkpointing: {LAYERS} layers" in str(report)


@pytest.mark.parametrize("in_closure", [False, True])
def test_a_checkpoint_in_a_part_of_a_layer_stays(in_closure: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(InPart, "in_closure", in_closure)
    wanted = _trained(Stack("plain"))
    model = Stack("plain", InPart)
    manager = memo.offload(model, layers=model.layers, alpha=1.0, host="8MiB", min_bytes=64)
    assert all(map(torch.equal, _trained(model, manager), wanted))
    assert all(block.calls == 2 * 2 for block in _blocks(model.layers))
    assert "not managed: layers.0 and 2 more: its own activation checkpointing" in str(manager.report())
    assert "saved tensors take at most" in manager.report().benefit
    assert manager.report().replaced == 0
    manager.close()


def test_a_checkpoint_in_a_layer_without_parameters_stays() -> None:
    model = Stack("plain", Bare)
    manager = memo.offload(model, layers=model.layers, alpha=1.0, host="8MiB", min_bytes=64)
    assert all(map(torch.equal, _trained(model, manager), _trained(Stack("plain", Bare))))
    assert all(block.calls == 2 * 2 for block in _blocks(model.layers))
    assert manager.report().replaced == 0
    manager.close()


@pytest.mark.parametrize("where", ["both", "recompute"])
def test_a_checkpoint_with_contexts_of_its_own_stays(where: str) -> None:
    """They may change what is computed, in the forward or in backward; without them gradients are others."""

    @contextmanager
    def doubled(weight: torch.Tensor) -> Iterator[None]:
        weight.mul_(2)
        yield
        weight.mul_(0.5)

    class InContexts(Stack):
        def _call(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
            def contexts() -> tuple[AbstractContextManager[Any], ...]:
                if where == "recompute":
                    return nullcontext(), doubled(layer.up.weight.data)
                return torch.autocast("cpu", torch.bfloat16), torch.autocast("cpu", torch.bfloat16)

            result: torch.Tensor = checkpoint(layer, x, use_reentrant=False, context_fn=contexts)
            return result

    wanted, plain, model = _trained(InContexts("")), _trained(Stack("plain")), InContexts("")
    assert not all(map(torch.equal, wanted, plain))
    manager = memo.offload(model, layers=model.layers, alpha=0.0, host="8MiB", min_bytes=64)
    assert all(map(torch.equal, _trained(model, manager), wanted))
    assert manager.report().replaced == 0
    manager.close()


def test_a_reentrant_checkpoint_stays() -> None:
    """Its gradients are its own: sums of inputs used three times, and none of what leaves a layer by a list."""

    class Thrice(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            aside: list[torch.Tensor] = []
            for layer in self.layers:
                layer.register_forward_hook(lambda module, args, output: aside.append(output.sum()))
                x = self._call(layer, x) + x * 0.3 + x.sin()
            return self.head(x) + torch.stack(aside).sum()  # type: ignore[no-any-return]

    wanted, model = _trained(Thrice("reentrant")), Thrice("reentrant")
    manager = memo.offload(model, layers=model.layers, alpha=0.0, host="8MiB", min_bytes=64)
    with pytest.warns(
        RuntimeWarning, match="not managed, or not as a whole: layers.0 and 2 more; .* use_reentrant=False"
    ) as told:
        got = _trained(model, manager)
    assert len(told) == 1
    assert all(map(torch.equal, got, wanted))
    assert all(block.calls == 2 * 2 for block in _blocks(model.layers))
    assert "use use_reentrant=False" in str(manager.report())
    manager.close()


def test_a_checkpoint_of_a_layers_forward_stays() -> None:
    """A plain call of it would run without the hooks on the layer, and save everything."""

    class OfForward(Stack):
        def _call(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = checkpoint(layer.forward, x, use_reentrant=False)
            return result

    wanted, model = _trained(OfForward("")), OfForward("")
    manager = memo.offload(model, layers=model.layers, alpha=1.0, host="8MiB", min_bytes=64)
    assert all(map(torch.equal, _trained(model, manager), wanted))
    assert all(block.calls == 2 * 2 for block in _blocks(model.layers))
    assert manager.report().replaced == 0
    manager.close()


def test_checkpoints_of_others_stay() -> None:
    """Outside of the manager, in another module of the model, and without gradients."""
    model = Stack("plain")
    manager = memo.offload(model, layers=model.layers, alpha=1.0, host="8MiB", min_bytes=64)
    x = torch.randn(64, WIDTH, requires_grad=True)
    with manager:
        loss = checkpoint(model.head, model.layers[0](x), use_reentrant=False).sum()
    loss.backward()
    assert [block.calls for block in _blocks(model)] == [1, 0, 0, 2]
    checkpoint(model.layers[0], x, use_reentrant=False).sum().backward()
    assert [block.calls for block in _blocks(model)] == [3, 0, 0, 2]
    with manager, torch.no_grad():
        checkpoint(model.layers[0], x, use_reentrant=False)
    assert manager.report().replaced == 0
    manager.close()


def test_checkpoints_that_offload_by_themselves_are_left_and_said() -> None:
    wanted = _trained(Stack("plain"))
    model = Stack("within", Within)
    for layer in model.layers:
        layer.hooks = save_on_cpu  # type: ignore[assignment]
    manager = memo.offload(model, layers=model.layers, alpha=1.0, host="8MiB", min_bytes=64)
    with pytest.warns(RuntimeWarning, match="is not managed: its activation checkpointing offloads") as told:
        got = _trained(model, manager)
    assert all(map(torch.equal, got, wanted))
    assert len(told) == 1
    assert str(manager.report()).startswith("not managed: its activation checkpointing offloads")
    manager.close()


@pytest.mark.parametrize("how", ["reentrant", "closure"])
def test_an_exception_of_the_layer_is_its_own(how: str) -> None:
    class Fails(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise ValueError("of the layer")

    model = Stack(how, Fails)
    manager = memo.offload(model, layers=model.layers, alpha=0.0, host="8MiB", min_bytes=64)
    with pytest.raises(ValueError, match="of the layer"), manager:
        model(torch.randn(64, WIDTH, requires_grad=True))
    manager.close()
