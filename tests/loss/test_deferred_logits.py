"""Deferred logits: what needs none makes none, and whoever looks at them sees the projection's own, with their gradients."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from live_bytes import LiveBytes
from torch import Tensor, nn

from memo.errors import UsageError
from memo.loss.deferred_logits import DeferredLogits, deferred

VOCAB, HIDDEN = 37, 16
TARGETS = torch.randint(VOCAB, (2, 9), generator=torch.Generator().manual_seed(1))

Look = Callable[[Tensor], Tensor]
Case = tuple[nn.Linear, Tensor]


@pytest.fixture(params=[False, True], ids=["matrix", "bias"])
def case(request: pytest.FixtureRequest) -> Case:
    torch.manual_seed(0)
    return nn.Linear(HIDDEN, VOCAB, bias=request.param).double(), torch.randn(2, 9, HIDDEN, dtype=torch.float64)


def logits_of(projection: nn.Linear, hidden: Tensor) -> DeferredLogits:
    return deferred(projection, hidden, chunk=4, keep_gradients=True)


def gradients(case: Case, product: Callable[[nn.Linear, Tensor], Tensor], look: Look) -> tuple[Tensor, list[Tensor]]:
    projection, hidden = case[0], case[1].clone().requires_grad_()
    value = look(product(projection, hidden))
    return value, list(torch.autograd.grad(value.sum(), [hidden, *projection.parameters()]))


def flat_loss(logits: Tensor) -> Tensor:
    return F.cross_entropy(logits.view(-1, VOCAB), TARGETS.flatten())


WITHOUT: dict[str, Look] = {
    "plain": flat_loss,
    "module": lambda x: nn.CrossEntropyLoss(ignore_index=3, reduction="sum")(x.flatten(0, 1), TARGETS.flatten()),
    "capped": lambda x: flat_loss(torch.tanh(x / 3.0) * 3.0),
    "scaled": lambda x: flat_loss(0.25 * x / 7),
    "scaled, capped, scaled": lambda x: flat_loss((x.mul(3) / 2.0).tanh() * 2.0 * 0.7),
    "cast": lambda x: flat_loss(x.double().contiguous().to("cpu").to(torch.float64).to(torch.empty(0).double())),
    "bias": lambda x: flat_loss(x + torch.linspace(-1, 1, VOCAB).double()[None]),
    "shifted": lambda x: F.cross_entropy(x[..., :-1, :].reshape(-1, VOCAB), TARGETS[:, 1:].flatten()),
    "shifted, all dimensions": lambda x: F.cross_entropy(x[:, :-1, :].reshape((-1, VOCAB)), TARGETS[:, 1:].flatten()),
    "one row": lambda x: F.cross_entropy(x[0], TARGETS[0]) + F.cross_entropy(x[1, 2:5], TARGETS[1, 2:5]),
    "detached beside": lambda x: flat_loss(x) + flat_loss(x.detach()),
}


@pytest.mark.parametrize("name", WITHOUT)
def test_a_loss_makes_no_logits_and_is_the_same(name: str, case: Case) -> None:
    has_two_biases = name == "bias" and case[0].bias is not None  # as no head has
    want, want_grads = gradients(case, lambda projection, hidden: projection(hidden), WITHOUT[name])
    made: list[DeferredLogits] = []

    def keep(projection: nn.Linear, hidden: Tensor) -> Tensor:
        made.append(logits_of(projection, hidden))
        return made[0]

    got, grads = gradients(case, keep, WITHOUT[name])
    assert made[0].product.computed == has_two_biases
    torch.testing.assert_close(got, want, rtol=0, atol=1e-12)
    torch.testing.assert_close(grads, want_grads, rtol=0, atol=1e-12)


class Squared(torch.autograd.Function):
    """Looks at its argument below __torch_function__, as compiled extensions do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * grad * x


def gradient_penalty(x: Tensor) -> Tensor:
    (slope,) = torch.autograd.grad(x.pow(3).sum(), x, retain_graph=True)
    return x * slope.detach()


LOOKED: dict[str, Look] = {
    "softmax": lambda x: x.softmax(-1)[..., 0],
    "smoothed": lambda x: F.cross_entropy(x.flatten(0, 1), TARGETS.flatten(), label_smoothing=0.1),
    "weighted": lambda x: F.cross_entropy(x.flatten(0, 1), TARGETS.flatten(), torch.linspace(0, 1, VOCAB).double()),
    "one loss a token": lambda x: F.cross_entropy(x.flatten(0, 1), TARGETS.flatten(), reduction="none"),
    "probabilities": lambda x: F.cross_entropy(x.flatten(0, 1), torch.full((18, VOCAB), 1 / VOCAB).double()),
    "classes first": lambda x: F.cross_entropy(x.transpose(1, 2), TARGETS),
    "tanh twice": lambda x: flat_loss(x.tanh().tanh()),
    "upside down": lambda x: flat_loss(x.tanh() * -2.0),
    "scale learned": lambda x: flat_loss(x * torch.tensor(0.5, dtype=torch.float64)),
    "added twice": lambda x: flat_loss(x * 2.0 + torch.ones(VOCAB, dtype=torch.float64)),
    "fewer words": lambda x: x[..., :5],
    "all words in one": lambda x: x.flatten(1),
    "a mask": lambda x: x[TARGETS > 5],
    "transposed, then a view": lambda x: x.view(-1).view(VOCAB, -1),
    "every operator": lambda x: 2.0 - x @ torch.ones(VOCAB, 2, dtype=torch.float64),
    "in two places": lambda x: flat_loss(x / 2.0) + (x / 2.0).logsumexp(-1).mean() + x[:, 1:].std(),
    "loop": lambda x: torch.stack([row.amax() for batch in x for row in batch]),
    "custom function": Squared.apply,
    "capped custom function": lambda x: Squared.apply(torch.tanh(x / 3.0) * 3.0),
    "its own gradient": gradient_penalty,
    "copied": lambda x: x.clone().mul_(2.0),
}


@pytest.mark.parametrize("name", LOOKED)
def test_whoever_looks_sees_the_projections_own(name: str, case: Case) -> None:
    want, want_grads = gradients(case, lambda projection, hidden: projection(hidden), LOOKED[name])
    got, grads = gradients(case, logits_of, LOOKED[name])
    assert type(got) is Tensor
    if name == "in two places":  # one of the two losses makes none
        torch.testing.assert_close([got, *grads], [want, *want_grads], rtol=0, atol=1e-12)
    else:
        assert torch.equal(got, want)
        assert all(map(torch.equal, grads, want_grads))


def test_what_a_tensor_says_of_itself_makes_nothing(case: Case) -> None:
    projection, hidden = case[0], case[1].requires_grad_()
    logits, own = logits_of(projection, hidden), projection(hidden)
    for name in ("shape", "dtype", "device", "ndim", "requires_grad", "is_leaf", "is_cuda", "layout", "nbytes"):
        assert getattr(logits, name) == getattr(own, name), name
    assert (logits.size(-1), logits.dim(), len(logits), logits.numel()) == (VOCAB, 3, 2, own.numel())
    assert torch.is_tensor(logits)
    assert torch.is_floating_point(logits)
    assert repr(logits) == "DeferredLogits(shape=(2, 9, 37), dtype=torch.float64, computed=False)"
    assert not logits.product.computed
    assert logits.argmax(-1).equal(own.argmax(-1))
    assert "computed=True" in repr(logits)


def test_logits_are_made_once(case: Case) -> None:
    logits = logits_of(*case)
    logits.softmax(-1)
    whole = logits.whole()
    with LiveBytes() as alive:
        logits.argmax(-1)
        flat_loss(logits).backward()  # now that they are there, of what is there
        assert alive.largest == whole.nbytes
    assert logits.whole() is whole
    assert logits.product.computed


def test_hooks_and_kept_gradients_are_those_of_logits(case: Case) -> None:
    grads, seen = [], []
    for product in (lambda projection, hidden: projection(hidden), logits_of):
        hidden = case[1].clone().requires_grad_()
        logits = product(case[0], hidden)
        logits.retain_grad()
        logits.register_hook(seen.append)
        (logits.softmax(-1) ** 2).sum().backward()
        grads.append(logits.grad)
    assert torch.equal(grads[0], grads[1])
    assert torch.equal(seen[0], seen[1])


def test_without_grad_mode_there_is_no_graph_whoever_looks(case: Case) -> None:
    hidden = case[1].requires_grad_()
    with torch.no_grad():
        logits = logits_of(case[0], hidden)
    assert not logits.requires_grad
    assert not logits.softmax(-1).requires_grad
    assert not flat_loss(logits_of(case[0], hidden).detach()).requires_grad
    with torch.no_grad():
        halved = logits_of(case[0], hidden) / 2.0
    assert not flat_loss(halved).requires_grad
    logits = logits_of(case[0], hidden)
    with torch.no_grad():
        logits.argmax(-1)  # makes them
        assert not flat_loss(logits_of(case[0], hidden)).requires_grad
    assert logits.softmax(-1).requires_grad


def test_autocast_is_that_of_the_call() -> None:
    torch.manual_seed(0)
    projection, hidden = nn.Linear(HIDDEN, VOCAB), torch.randn(2, 9, HIDDEN)
    with torch.autocast("cpu", torch.bfloat16):
        logits, own = logits_of(projection, hidden), projection(hidden)
        inside = flat_loss(logits_of(projection, hidden))
    assert logits.dtype is torch.bfloat16
    assert torch.equal(flat_loss(logits), inside)
    assert torch.equal(logits.clone(), own)
    later = logits_of(projection, hidden)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(later.clone(), projection.forward(hidden.float()).float()) is False
    assert later.dtype is torch.float32


@pytest.mark.parametrize("changed", ["weight", "bias", "hidden"])
def test_logits_of_weights_that_have_changed_are_refused(changed: str) -> None:
    projection, hidden = nn.Linear(HIDDEN, VOCAB), torch.randn(2, 9, HIDDEN)
    looked, unseen = logits_of(projection, hidden), logits_of(projection, hidden)
    before = looked.softmax(-1)
    with torch.no_grad():
        {**dict(projection.named_parameters()), "hidden": hidden}[changed].mul_(2.0)
    for look in (flat_loss, lambda x: x.softmax(-1), lambda x: x[:, :-1].argmax(-1)):
        with pytest.raises(UsageError, match="read them before the optimizer's step"):
            look(unseen)
    assert torch.equal(looked.softmax(-1), before)


WRITES: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x.__setitem__((0, 0), 1.0),
    "method": lambda x: x.div_(2.0),
    "operator": lambda x: x.__imul__(2.0),
    "out": lambda x: torch.add(torch.ones_like(x), 1.0, out=x),
    "masked": lambda x: x.masked_fill_(x > 0, -1.0),
    "of a slice": lambda x: x[:, :-1].zero_(),
}


@pytest.mark.parametrize("name", WRITES)
def test_writing_into_them_is_refused(name: str) -> None:
    with torch.no_grad():
        logits = logits_of(nn.Linear(HIDDEN, VOCAB), torch.randn(2, 9, HIDDEN))
    with pytest.raises(UsageError, match="cannot be written into; write into a clone"):
        WRITES[name](logits)


def test_copies_are_ordinary_tensors(case: Case) -> None:
    with torch.no_grad():
        logits, own = logits_of(*case), case[0](case[1])
    assert type(copy.deepcopy(logits)) is Tensor
    assert torch.equal(copy.deepcopy(logits), own)
    assert logits.tolist() == own.tolist()
    assert torch.equal(torch.from_numpy(logits.numpy()), own)


def test_nothing_outlives_the_logits(case: Case) -> None:
    gc.collect()
    gc.disable()
    try:
        hidden = case[1].clone().requires_grad_() * 1.0
        alive = weakref.ref(hidden)
        logits = logits_of(case[0], hidden)
        flat_loss(torch.tanh(logits / 3.0) * 3.0).backward()
        logits[:, 1:].argmax(-1)
        del hidden
        assert alive() is not None
        del logits
        assert alive() is None
    finally:
        gc.enable()
