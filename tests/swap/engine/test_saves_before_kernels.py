"""What autograd saves before its operator's kernel has run: a copy out begins only when that operator has ended."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from small_models import Stack, assert_equal, checked, ids, plain, stack, train
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from memo.events import TensorState as State
from memo.swap.engine.d2h import CopyOut
from memo.swap.engine.handles import Handle

if TYPE_CHECKING:
    from collections.abc import Callable

    import memo

POLICIES = ["lazy", "eager", "random"]


class Noisy(nn.Module):
    """Its activation fills the noise that autograd has saved already."""

    in_place = False
    last = False

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(32), nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(self.norm(x)).sin()
        y = F.rrelu_(y, training=True) if self.in_place else F.rrelu(y, training=True)  # type: ignore[attr-defined]
        return y[..., :32] if self.last else x + self.down(y.tanh())


class NoisyInPlace(Noisy):
    in_place = True


class EndsNoisy(Noisy):
    """No operator saves after it."""

    last = True


class WithinFunction(torch.autograd.Function):
    """Makes nodes within its own, and saves after them."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            inner = x.detach().requires_grad_()
            out = F.rrelu(inner.sin(), training=True)
        ctx.save_for_backward(inner, out)
        return out.detach().clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        inner, out = ctx.saved_tensors
        return torch.autograd.grad(out, inner, grad)[0]


class CallsFunction(Noisy):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(WithinFunction.apply(self.up(self.norm(x))).tanh())


class Between(Stack):
    """Saves between its layers, too."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = F.rrelu(self.embed(ids), training=True)
        for layer in self.layers:
            x = F.rrelu(layer(x).sin(), training=True)
        return x.square().mean()


def between() -> Between:
    torch.manual_seed(0)
    return Between(make=Noisy)


MODELS: dict[str, Callable[[], Stack]] = {
    "of its own": lambda: stack(make=Noisy),
    "in place": lambda: stack(make=NoisyInPlace),
    "at the end": lambda: stack(make=EndsNoisy),
    "in a function": lambda: stack(make=CallsFunction),
    "between layers": between,
}


@pytest.mark.parametrize("alpha", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("model", MODELS)
def test_noise_that_its_operator_fills_after_the_save(
    offload: Callable[..., memo.Manager], model: str, alpha: float
) -> None:
    make = MODELS[model]
    managed = make()
    manager = offload(managed, alpha=alpha)
    assert_equal(train(managed, lambda step: managed(ids(step)), manager), plain(make))
    assert manager.stats.bytes_reloaded > 0


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("model", MODELS)
def test_noise_under_every_schedule_of_copies(model: str, policy: str) -> None:
    make = MODELS[model]
    managed = make()
    made = checked(managed, policy)
    assert_equal(train(managed, lambda step: managed(ids(step)), made.manager), plain(make))
    assert made.backend.races == []
    made.manager.close()


def test_a_copy_begins_at_the_next_operators_save(offload: Callable[..., memo.Manager]) -> None:
    """And not later, so that it overlaps with the rest of its layer; none is left when the layer has ended."""
    states: list[list[State]] = []
    handles: list[Handle] = []

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(32))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for operator in (torch.sin, torch.exp, torch.tanh):
                x = operator(x * self.weight)
                states.append([handle.hold.saved.state for handle in handles])
            return x

    model = stack(make=Watched, layers=2)
    manager = offload(model)
    engine = manager._engine
    pack = engine.pack

    def watch(tensor: torch.Tensor) -> Any:
        packed = pack(tensor)
        if isinstance(packed, Handle) and not handles[2:] and packed.hold not in [other.hold for other in handles]:
            handles.append(packed)
        return packed

    engine.pack = watch  # type: ignore[method-assign]
    with manager:
        loss = model(ids())
    in_first = states[:3]
    # x * weight saves x, sin its argument; the first has been left when the second is saved, and so on.
    assert in_first[0] == [State.LEAVING, State.LIVE]
    assert in_first[1] == [State.LEAVING, State.LEAVING, State.LEAVING]
    assert all(handle.hold.saved.state in (State.LEAVING, State.AWAY) for handle in handles)
    loss.backward()
    handles.clear()


@pytest.mark.parametrize("interrupted", [RuntimeError, KeyboardInterrupt])
def test_nothing_waits_for_an_operator_when_a_forward_is_broken_off(
    offload: Callable[..., memo.Manager], interrupted: type[BaseException]
) -> None:
    class Breaks(Noisy):
        breaks = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = F.rrelu(self.up(self.norm(x)).sin(), training=True)
            if Breaks.breaks:
                raise interrupted
            return x + self.down(y)

    model = stack(make=Breaks)
    manager = offload(model)
    with pytest.raises(interrupted), manager:
        model(ids())
    assert manager._engine._copy_out._being_saved == []
    Breaks.breaks = False
    torch.manual_seed(1)
    got = train(model, lambda step: model(ids(step)), manager)
    torch.manual_seed(1)
    reference = stack(make=Breaks)
    torch.manual_seed(1)
    assert_equal(got, train(reference, lambda step: reference(ids(step))))


# What Note [A save before its kernel] of memo.swap.engine.d2h relies on.

_nodes_made = torch._C._autograd._get_sequence_nr


@torch.library.custom_op("memo_tests::fills", mutates_args={"noise"})
def fills(x: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    """A kernel in Python, which asks for gradients of what it does."""
    before = _nodes_made()
    with torch.enable_grad():
        noise.copy_(torch.ones_like(x, requires_grad=True).sin())
    _within.append(_nodes_made() - before)
    return x * noise


class Asks(TorchDispatchMode):
    """Runs operators of its own below each operator, with gradients on."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = _nodes_made()
        with torch.enable_grad():
            torch.ones(3, requires_grad=True).sin()
        out = func(*args, **(kwargs or {}))
        _within.append(_nodes_made() - before)
        return out


_within: list[int] = []


@pytest.mark.parametrize("how", ["kernel in Python", "dispatch mode"])
def test_no_node_is_made_below_an_operator(how: str) -> None:
    _within.clear()
    x = torch.randn(8, requires_grad=True)
    before = _nodes_made()
    if how == "dispatch mode":
        with Asks():
            F.rrelu(x, training=True).sin()
        assert _nodes_made() == before + 2
    else:
        torch.ops.memo_tests.fills(x.detach(), torch.empty(8))
    assert _within
    assert set(_within) == {0}


def test_each_operator_makes_its_node_before_it_saves() -> None:
    counts: list[list[int]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        counts[-1].append(_nodes_made())
        return tensor.detach()

    x = torch.randn(8, requires_grad=True)
    operators: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda y: F.rrelu(y, training=True), torch.sin, lambda y: y * y.exp().detach(), WithinFunction.apply, torch.tanh,
    ]  # fmt: skip
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        for operator in operators:
            counts.append([_nodes_made()])
            x = operator(x)
    for before, *saves in counts:
        assert saves
        assert min(saves) > before


def test_copies_that_begin_at_the_save_have_other_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests above can fail."""

    def saves(self: CopyOut, saved: Any) -> None:
        self._send(saved, self._order.written(saved.home))

    monkeypatch.setattr(CopyOut, "saves", saves)
    model = stack(make=Noisy)
    made = checked(model, "eager")
    got = train(model, lambda step: model(ids(step)), made.manager)
    with pytest.raises(AssertionError):
        assert_equal(got, plain(lambda: stack(make=Noisy)))
    made.manager.close()
