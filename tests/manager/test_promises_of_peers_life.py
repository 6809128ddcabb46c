"""What other packages' tests of activation offloading promise of a manager's life holds here: steps, errors, nesting, ends.

Each case names the suite whose promise it is; the words and the code are ours. What they promise of saved tensors is in
test_promises_of_peers.py; docs/promises.md lists both.
"""

from __future__ import annotations

import gc
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from small_models import Block, Stack, assert_equal, ids, plain, stack, train
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import memo
from memo.errors import HostBudgetExceeded, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

TRL = "TRL: tests/test_activation_offloading.py"
TE = "TransformerEngine: tests/pytorch/test_cpu_offloading.py"
MEGATRON_PINNED = "Megatron-LM: tests/unit_tests/pipeline_parallel/test_pinned_activation_buffer.py"
MEGATRON_FINE = "Megatron-LM: tests/unit_tests/pipeline_parallel/test_fine_grained_activation_offloading.py"
DEEPSPEED = "DeepSpeed: tests/unit/runtime/activation_checkpointing/test_activation_checkpointing.py"
DEEPSPEED_OFFLOAD = "DeepSpeed: tests/unit/runtime/activation_checkpointing/test_offload_activations.py"
AXOLOTL = "Axolotl: tests/e2e/test_activation_offloading.py"

HOST: dict[str, Any] = {"alpha": 1.0, "host": "64MiB", "disk": [], "min_bytes": 512}


def suite(name: str) -> Any:
    """Puts the suite whose promise a test is beside it, and into the test's id."""
    return pytest.mark.parametrize("promised_by", [pytest.param(name, id=name.split(":")[0])])


@pytest.fixture
def model() -> Stack:
    return stack()


@pytest.fixture
def manager(model: Stack) -> Iterator[memo.Manager]:
    made = memo.offload(model, **HOST)
    yield made
    made.close()


def hooks_of(model: nn.Module) -> int:
    """Hooks that are on a model and its parts."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return sum(len(getattr(module, kind)) for module in model.modules() for kind in kinds)


def steps_are_right(model: Stack, manager: memo.Manager) -> None:
    model.zero_grad()
    assert_equal(train(model, lambda step: model(ids(step)), manager), plain())
    gc.collect()
    assert manager.stats.live_entries == 0
    assert manager.stats.saved_bytes == 0


@suite(TRL)
def test_a_section_with_hooks_of_its_own_is_left_out(model: Stack, manager: memo.Manager, promised_by: str) -> None:
    with manager:
        model(ids())
        saved = manager.stats.packed
        with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            loss = model(ids())
        assert manager.stats.packed == saved > 0
    loss.backward()
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), plain(steps=1)[0].gradients, strict=True))


class Branches(nn.Module):
    """A layer whose second result nobody uses."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.unused = Block(32, 2), Block(32, 2)
        self.results: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.results[:] = [self.unused(x)]
        return self.block(x)


@pytest.mark.promise("R1")
@suite(f"{TRL}; {TE}")
@pytest.mark.parametrize("tier", ["host", "disk"])
def test_branches_without_backward_leave_nothing_from_step_to_step(tier: str, tmp_path: Path, promised_by: str) -> None:
    made = Stack(make=Branches)
    options = {} if tier == "host" else {"host": 0, "disk": tmp_path}
    with_memo = memo.offload(made, **{**HOST, **options})
    after, within = set(), set()
    for _ in range(20):
        with with_memo:
            loss = made(ids())
        within.add(with_memo.stats.saved_bytes)
        loss.backward()
        after.add((with_memo.stats.live_entries, with_memo.stats.saved_bytes))
    assert len(within) == 1
    assert len(after) == 1
    for layer in made.layers:
        layer.results.clear()
    del loss
    gc.collect()
    assert with_memo.stats.live_entries == 0
    with_memo.close()  # a buffer whose copy is under way stays until it is done
    assert with_memo.stats.device_bytes == 0


class Failing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, when: str) -> torch.Tensor:
        ctx.when = when
        if when == "forward":
            raise ValueError("in forward")
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.when == "backward":
            raise ValueError("in backward")
        return gradient, None


@suite(f"{DEEPSPEED_OFFLOAD}; {TRL}")
@pytest.mark.parametrize("attached", [False, True])
@pytest.mark.parametrize("when", ["forward", "backward"])
def test_after_an_exception_nothing_is_left_and_the_next_step_is_right(
    when: str, attached: bool, model: Stack, manager: memo.Manager, promised_by: str
) -> None:
    before = hooks_of(model)
    within: Any = model.layers[1]
    fails = within.norm2.register_forward_hook(lambda module, args, out: Failing.apply(out, when))

    def failing() -> None:
        if attached:
            manager.attach()
            model(ids()).backward()
        else:
            with manager:
                loss = model(ids())
            loss.backward()

    with pytest.raises(ValueError, match="in "):
        failing()
    fails.remove()
    manager.detach()
    gc.collect()
    assert manager.stats.live_entries == 0
    assert hooks_of(model) == before
    steps_are_right(model, manager)


@suite(DEEPSPEED_OFFLOAD)
def test_hooks_are_on_the_model_only_within_also_when_nested(
    model: Stack, manager: memo.Manager, promised_by: str
) -> None:
    before, forwards = hooks_of(model), [module.forward for module in model.modules()]
    calls = [type(module).__call__ for module in model.modules()]
    with manager:
        within = hooks_of(model)
        assert within > before
        with manager:
            assert hooks_of(model) == within
            loss = model(ids())
        assert hooks_of(model) == within
    assert hooks_of(model) == before
    loss.backward()
    manager.attach()
    model(ids()).backward()
    manager.close()
    assert hooks_of(model) == before
    assert [module.forward for module in model.modules()] == forwards
    assert [type(module).__call__ for module in model.modules()] == calls


@suite(DEEPSPEED)
def test_forwards_without_gradients_leave_the_engine_as_it_was(
    model: Stack, manager: memo.Manager, promised_by: str
) -> None:
    want = model(ids()).detach()
    with torch.no_grad(), manager:
        assert torch.equal(model(ids()), want)
    with torch.inference_mode(), manager:
        assert torch.equal(model(ids()), want)
    assert (manager.stats.packed, manager.stats.live_entries, manager.stats.bytes_host) == (0, 0, 0)
    steps_are_right(model, manager)


@suite(f"{DEEPSPEED_OFFLOAD}; {TE}")
def test_use_out_of_order_is_an_error_that_names_it(model: Stack, manager: memo.Manager, promised_by: str) -> None:
    with pytest.raises(UsageError, match="min_bytes"):
        memo.offload(model, alpha=1.0, min_bytes=-1)
    with manager, pytest.raises(UsageError, match="between forwards"):
        manager.choose_levels({0: 0.5})
    with manager:
        loss = model(ids())
    manager.close()
    with pytest.raises(UsageError, match="closed"), manager:
        pass
    with pytest.raises(memo.MemoError, match="closed"):
        loss.backward()


@suite(DEEPSPEED_OFFLOAD)
def test_what_left_comes_back_exactly_once_a_step(model: Stack, manager: memo.Manager, promised_by: str) -> None:
    ratios = set()
    for number in range(3):
        before = manager.stats.bytes_reloaded + manager.stats.bytes_forwarded
        with manager:
            loss = model(ids(number))
        saved = manager.stats.saved_bytes
        loss.backward()
        ratios.add((manager.stats.bytes_reloaded + manager.stats.bytes_forwarded - before) / saved)
    assert ratios == {1.0}


@suite(f"{DEEPSPEED_OFFLOAD}; {TE}")
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 0, 2)], ids=str)
def test_forwards_before_their_backwards_in_any_order(
    order: tuple[int, ...], model: Stack, manager: memo.Manager, promised_by: str
) -> None:
    reference = stack()
    losses = [reference(ids(number)) for number in range(3)]
    for number in order:
        losses[number].backward()
    ours = []
    for number in range(3):
        with manager:
            ours.append(model(ids(number)))
    for number in order:
        ours[number].backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), reference.parameters(), strict=True))


@pytest.mark.promise("R1")
@suite(TE)
def test_backward_twice_and_of_backward(model: Stack, manager: memo.Manager, promised_by: str) -> None:
    def derivatives(run: Any, loss: torch.Tensor) -> list[torch.Tensor]:
        parameters = [p for name, p in run.named_parameters() if "norm" in name]
        again = torch.autograd.grad(loss, parameters, retain_graph=True)
        first = torch.autograd.grad(loss, parameters, create_graph=True)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))
        second = torch.autograd.grad(sum(g.square().sum() for g in first), parameters)
        return [*first, *second]

    def loss_of(run: Stack) -> torch.Tensor:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            return run(ids())

    reference = stack()
    with manager:
        loss = loss_of(model)
    got, want = derivatives(model, loss), derivatives(reference, loss_of(reference))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


def no_attention_again(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if "attention" in str(op) else CheckpointPolicy.PREFER_RECOMPUTE


class Checkpointed(nn.Module):
    """A block with dropout that its user checkpoints."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.block, self.dropout, self.kind = Block(32, 2), nn.Dropout(0.2), kind

    def inner(self, x: torch.Tensor) -> torch.Tensor:
        return self.dropout(self.block(x))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "selective":
            contexts = partial(create_selective_checkpoint_contexts, no_attention_again)
            return checkpoint(self.inner, x, use_reentrant=False, context_fn=contexts)
        return checkpoint(self.inner, x, use_reentrant=self.kind == "reentrant")


@suite(f"{AXOLOTL}; {TRL}; {DEEPSPEED_OFFLOAD}")
@pytest.mark.parametrize("tier", ["host", "disk"])
@pytest.mark.parametrize("kind", ["reentrant", "full", "selective"])
def test_checkpointing_with_dropout_inside(kind: str, tier: str, tmp_path: Path, promised_by: str) -> None:
    def steps(*, managed: bool) -> Any:
        run = stack(make=lambda: Checkpointed(kind))
        options = {**HOST, **({} if tier == "host" else {"host": 0, "disk": tmp_path})}
        manager = memo.offload(run, **options) if managed else None
        torch.manual_seed(3)
        done = train(run, lambda step: run(ids(step)), manager)
        if manager is not None:
            assert manager.stats.bytes_host + manager.stats.bytes_disk > 0
            if kind != "selective":  # the inputs alone
                assert manager.stats.peak_saved_bytes <= 4 * ids().numel() * 32 * 4
            manager.close()
        return done

    assert_equal(steps(managed=True), steps(managed=False))


class Adapted(nn.Module):
    """A frozen block with a low-rank adapter beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block(32, 2).requires_grad_(False)
        self.a, self.b, self.dropout = nn.Linear(32, 4, bias=False), nn.Linear(4, 32, bias=False), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x) + self.b(self.a(self.dropout(x)))


@suite(f"{TRL}; {AXOLOTL}")
@pytest.mark.parametrize("alpha", [1.0, 0.0])
@pytest.mark.parametrize("autocast", [False, True])
def test_frozen_layers_with_adapters(autocast: bool, alpha: float, promised_by: str) -> None:
    def steps(*, managed: bool) -> Any:
        run = stack(make=Adapted)
        run.embed.requires_grad_(False)
        manager = memo.offload(run, **{**HOST, "alpha": alpha}) if managed else None

        def forward(step: int) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                return run(ids(step))

        torch.manual_seed(3)
        done = train(run, forward, manager)
        if manager is not None:
            assert manager.stats.bytes_host > 0
            manager.close()
        return done

    assert_equal(steps(managed=True), steps(managed=False))


@suite(MEGATRON_FINE)
def test_outputs_too_are_those_without(model: Stack, manager: memo.Manager, promised_by: str) -> None:
    with manager:
        ours = model(ids())
    assert torch.equal(ours, stack()(ids()))


@pytest.mark.promise("P2")
@suite(MEGATRON_PINNED)
def test_a_full_tier_raises_and_what_is_in_it_is_not_overwritten(promised_by: str) -> None:
    model = stack()
    with_room = memo.offload(model, **HOST)
    with with_room:
        loss = model(ids())
    need = with_room.stats.saved_bytes
    loss.backward()
    with_room.close()

    model = stack()
    manager = memo.offload(model, **{**HOST, "host": 3 * need // 2, "on_full": "raise"})
    with manager:
        first = model(ids())

    def two_more() -> None:
        with manager:
            for _ in range(2):
                model(ids(1))
                held.append(model(ids(1)))

    held: list[torch.Tensor] = []
    with pytest.raises(HostBudgetExceeded):
        two_more()
    first.backward()
    want = plain(steps=1)[0].gradients
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), want, strict=True))
    held.clear()
    del first
    gc.collect()
    steps_are_right(model, manager)
    manager.close()
