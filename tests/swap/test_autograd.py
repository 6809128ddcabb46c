"""Every odd path of autograd through the engine: what is saved comes back exact, or an error is raised."""

from __future__ import annotations

import contextlib
import gc
import os
from typing import TYPE_CHECKING, Any

import pytest
import torch
from small_models import Block, Stack, assert_equal, gradients, ids, stack, train
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import memo
from memo.errors import MemoError, ModifiedAfterSave, NoRepeatedLayers, SwapError
from memo.units import parse_bytes

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path


@pytest.fixture
def offload(tmp_path: Path) -> Iterator[Callable[..., memo.Manager]]:
    """memo.offload to a disk; afterwards nothing may be left anywhere."""
    made: list[memo.Manager] = []

    def make(model: nn.Module, **options: Any) -> memo.Manager:
        made.append(memo.offload(model, **{"disk": tmp_path, "min_bytes": 512, "alpha": 1.0, **options}))
        return made[-1]

    yield make
    # After an exception in backward, autograd's own queue holds the nodes it had not reached until the next backward.
    torch.ones(1, requires_grad=True).sum().backward()
    gc.collect()
    for manager in made:
        assert manager.stats.live_entries == 0
        manager.close()  # copies that were still running when their tensors died are over now
        assert manager.stats.device_bytes == 0
        assert all(tier.used == 0 for tier in manager._engine.tiers)
    assert list(tmp_path.iterdir()) == []


def plain(make: Callable[[], nn.Module] = stack, **kwargs: Any) -> list[Any]:
    model = make()
    return train(model, lambda step: model(ids(step)), **kwargs)


def test_retain_graph_gives_the_same_gradients_twice(offload: Callable[..., memo.Manager]) -> None:
    model = stack()
    with offload(model):
        loss = model(ids())
    loss.backward(retain_graph=True)
    first = gradients(model)
    model.zero_grad()
    loss.backward()
    assert all(torch.equal(a, b) for a, b in zip(first, gradients(model), strict=True))
    reference = stack()
    reference(ids()).backward()
    assert all(torch.equal(a, b) for a, b in zip(first, gradients(reference), strict=True))


def test_double_backward_gives_the_same_second_order_gradients(offload: Callable[..., memo.Manager]) -> None:
    class Smooth(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.tanh(self.linear(x))

    def second_order(manager: memo.Manager | None, model: Stack) -> list[torch.Tensor]:
        parameters = list(model.parameters())
        if manager is None:
            loss = model(ids())
        else:
            with manager:
                loss = model(ids())
        first = torch.autograd.grad(loss, parameters, create_graph=True)
        return list(torch.autograd.grad(sum((g * g).sum() for g in first), parameters))

    model = stack(make=Smooth)
    got = second_order(offload(model), model)
    want = second_order(None, stack(make=Smooth))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_forward_without_backward_frees_everything(offload: Callable[..., memo.Manager]) -> None:
    model = stack()
    manager = offload(model)
    for step in range(3):
        with manager:
            loss = model(ids(step))
        del loss
        gc.collect()
        assert manager.stats.live_entries == 0
    assert_equal(train(model, lambda step: model(ids(step)), manager), plain())


def test_eval_under_no_grad_saves_nothing_and_disturbs_nothing(offload: Callable[..., memo.Manager]) -> None:
    model = stack()
    manager = offload(model)
    with manager, torch.no_grad():
        model.eval()(ids(7))
    assert manager.stats.packed == 0
    model.train()
    assert_equal(train(model, lambda step: model(ids(step)), manager), plain())


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_exception_is_followed_by_a_normal_step(offload: Callable[..., memo.Manager], where: str) -> None:
    model = stack()
    manager = offload(model)

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    if where == "forward":
        hook = model.layers[1].register_forward_hook(fail)
        with pytest.raises(ZeroDivisionError), manager:
            model(ids())
    else:
        hook = model.layers[1].norm1.weight.register_hook(fail)
        with manager:
            loss = model(ids())
        with pytest.raises(ZeroDivisionError):
            loss.backward()
        del loss
    hook.remove()
    model.zero_grad()
    assert_equal(train(model, lambda step: model(ids(step)), manager), plain())


class ChangesItsInput(nn.Module):
    """Saves a tensor, then adds to it in place: stock autograd raises in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.exp(self.linear(x))  # exp saves its output
        y.mul_(0.5)
        return x + y


@pytest.mark.parametrize("min_bytes", [512, "1GiB"], ids=["moved", "kept"])
def test_in_place_change_after_save_raises(offload: Callable[..., memo.Manager], min_bytes: Any) -> None:
    model = stack(make=ChangesItsInput)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        model(ids()).backward()
    manager = offload(model, min_bytes=min_bytes)
    with manager:
        loss = model(ids())
    with pytest.raises(ModifiedAfterSave, match=r"changed in place"):
        loss.backward()


def test_parameter_changed_between_forward_and_backward_raises(offload: Callable[..., memo.Manager]) -> None:
    model = stack()
    with offload(model):
        loss = model(ids())
    with torch.no_grad():
        model.layers[0].up.weight.add_(1.0)
    with pytest.raises(ModifiedAfterSave):
        loss.backward()


def test_a_buffer_rewritten_after_a_save_is_not_taken_for_its_old_content(
    offload: Callable[..., memo.Manager],
) -> None:
    """Identity is storage and version: the storage alone would answer the second save with the first one's bytes."""

    class Rewrites(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(32))
            self.work = torch.ones(2, 48, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.work.add_(1.0)
            return x + self.weight * self.work

    def second_of_two(manager: Any, model: Stack) -> list[torch.Tensor | None]:
        with manager:
            first = model(ids(0))
            second = model(ids(1))
        second.backward()
        del first
        return gradients(model)

    model = stack(make=Rewrites)
    got = second_of_two(offload(model), model)
    want = second_of_two(contextlib.nullcontext(), stack(make=Rewrites))
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_tied_embeddings_are_not_moved(offload: Callable[..., memo.Manager]) -> None:
    class Tied(nn.Module):
        """Every layer projects with one shared weight and its transpose."""

        def __init__(self, weight: nn.Parameter) -> None:
            super().__init__()
            self.weight = weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.tanh(x @ self.weight.t()) @ self.weight

    def make() -> Stack:
        torch.manual_seed(0)
        shared = nn.Parameter(torch.randn(128, 32) / 8)
        return stack(make=lambda: Tied(shared))

    model = make()
    manager = offload(model)
    with manager:
        loss = model(ids())
    weight = model.layers[0].weight
    assert all(saved.nbytes != weight.untyped_storage().nbytes() for saved in lives(manager))
    loss.backward()
    model.zero_grad()
    del loss
    assert_equal(train(model, lambda step: model(ids(step)), manager), plain(make))


def lives(manager: memo.Manager) -> list[Any]:
    return [saved for group in manager._engine._groups for saved in group.living()]


def test_fused_qkv_moves_once(offload: Callable[..., memo.Manager]) -> None:
    model = stack()
    manager = offload(model)
    with manager:
        loss = model(ids())
    b, s, h = 2, 48, 32
    first = [saved.nbytes for saved in lives(manager) if saved.module == "layers.0"]
    assert first.count(3 * b * s * h * 4) == 1  # q, k and v: three views of one storage
    big = [nbytes for nbytes in first if nbytes >= b * s * h * 4]
    # input, norm1, qkv (3), attention, residual, norm2, up (4), gelu (4): sixteen units
    assert sum(big) == 16 * b * s * h * 4
    assert manager.stats.deduplicated > 0
    loss.backward()


def test_square_weight_and_its_transpose_are_not_moved(offload: Callable[..., memo.Manager]) -> None:
    class Square(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(32, 32) / 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + torch.tanh(x @ self.weight) @ self.weight.t()

    model = stack(make=Square)
    manager = offload(model)
    with manager:
        loss = model(ids())
    assert all(saved.nbytes != 32 * 32 * 4 for saved in lives(manager))
    del loss
    assert_equal(train(model, lambda step: model(ids(step)), manager), plain(lambda: stack(make=Square)))


def test_an_activation_and_its_transpose_share_one_copy_and_keep_their_geometry(
    offload: Callable[..., memo.Manager],
) -> None:
    """A square activation: keys made of address and size cannot tell it from its transpose."""

    class Gram(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 48)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            a = self.linear(x)  # (b, 48, 48)
            return x + (a * a.transpose(1, 2)) @ x

    model = stack(make=Gram)
    got = train(model, lambda step: model(ids(step)), offload(model))
    assert_equal(got, plain(lambda: stack(make=Gram)))


def test_gradient_accumulation_over_three_microbatches(offload: Callable[..., memo.Manager]) -> None:
    def accumulate(model: Stack, manager: Any) -> list[torch.Tensor | None]:
        for micro in range(3):
            with manager:
                loss = model(ids(micro)) / 3
            loss.backward()
        return gradients(model)

    model = stack()
    got, want = accumulate(model, offload(model)), accumulate(stack(), contextlib.nullcontext())
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_several_forwards_before_their_backwards(offload: Callable[..., memo.Manager], order: tuple[int, ...]) -> None:
    def run(model: Stack, manager: Any) -> list[torch.Tensor | None]:
        for _ in range(2):  # the second round prefetches by the order observed in the first
            losses = []
            for micro in range(3):
                with manager:
                    losses.append(model(ids(micro)))
            for micro in order:
                losses[micro].backward()
        return gradients(model)

    model = stack()
    manager = offload(model)
    got, want = run(model, manager), run(stack(), contextlib.nullcontext())
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_layers_recompute_as_their_user_asked(
    offload: Callable[..., memo.Manager], reentrant: bool
) -> None:
    class Checkpointed(Stack):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embed(tokens)
            for layer in self.layers:
                x = checkpoint(layer, x, use_reentrant=reentrant)
            return F.cross_entropy((self.norm(x) @ self.embed.weight.t()).flatten(0, 1), tokens.flatten())

    def make() -> Checkpointed:
        torch.manual_seed(0)
        return Checkpointed()

    model = make()
    manager = offload(model)
    got = train(model, lambda step: model(ids(step)), manager)
    assert_equal(got, plain(make))
    assert manager.stats.bytes_disk + manager.stats.bytes_forwarded > 0
    # The checkpoints' inputs move and nothing else does: two a step are saved before another layer follows.
    assert manager.stats.bytes_disk <= 3 * 3 * (2 * 48 * 32 * 4)


def test_a_users_own_hooks_inside_win(offload: Callable[..., memo.Manager]) -> None:
    class Own(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autograd.graph.save_on_cpu():
                return super().forward(x)

    def make() -> Stack:
        return stack(make=lambda: Own(32, 2))

    model = make()
    manager = offload(model)
    assert_equal(train(model, lambda step: model(ids(step)), manager), plain(make))
    assert manager.stats.bytes_disk == 0


def test_a_custom_function_may_ask_for_its_tensors_twice(offload: Callable[..., memo.Manager]) -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, y)
            return x * y

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            x, _ = ctx.saved_tensors
            _, y = ctx.saved_tensors
            return grad * y, grad * x

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + Twice.apply(self.linear(x), x)

    model = stack(make=Layer)
    got = train(model, lambda step: model(ids(step)), offload(model))
    assert_equal(got, plain(lambda: stack(make=Layer)))


def test_views_with_offsets_strides_expansion_and_no_elements(offload: Callable[..., memo.Manager]) -> None:
    class Views(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 96)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            wide = self.linear(x)
            a, b, c = wide[..., 5:69:2], wide.transpose(0, 1)[3:, :, 64:], wide[:, :1, :32].expand(2, 48, 32)
            none = wide[:, :0, :32]
            y = torch.sigmoid(a) * c
            y = torch.cat([y, none * none], 1)
            z = F.pad((b * b).transpose(0, 1), (0, 0, 3, 0))
            return x + y + z

    model = stack(make=Views)
    got = train(model, lambda step: model(ids(step)), offload(model, min_bytes=0))
    assert_equal(got, plain(lambda: stack(make=Views)))


def test_complex_conjugated_and_sparse_tensors_pass_through(offload: Callable[..., memo.Manager]) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 32)
            self.register_buffer("mix", torch.eye(48).to_sparse())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            spectrum = torch.fft.rfft(self.linear(x), dim=-1)
            power = (spectrum * spectrum.conj()).real
            mixed = torch.stack([torch.sparse.mm(self.mix, item) for item in x])
            return mixed + F.pad(power, (0, 15)) / 32

    model = stack(make=Odd)
    got = train(model, lambda step: model(ids(step)), offload(model))
    assert_equal(got, plain(lambda: stack(make=Odd)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_casts_of_weights_stay(offload: Callable[..., memo.Manager], dtype: torch.dtype) -> None:
    def forward(model: Stack) -> Callable[[int], torch.Tensor]:
        def run(step: int) -> torch.Tensor:
            with torch.autocast("cpu", dtype=dtype):
                return model(ids(step))

        return run

    model, reference = stack(), stack()
    manager = offload(model)
    got = train(model, forward(model), manager)
    assert_equal(got, train(reference, forward(reference)))
    with manager:
        loss = forward(model)(0)
    casts = {2 * p.numel() for p in model.layers[0].parameters() if p.ndim == 2}
    activations = {2 * 2 * 48 * width for width in (32, 96, 128)}
    assert not {saved.nbytes for saved in lives(manager)} & (casts - activations)
    del loss


def test_other_arguments_of_a_layer_stay(offload: Callable[..., memo.Manager]) -> None:
    class Rotated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 32)

        def forward(self, x: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
            return x + self.linear(x) * table

    class WithTable(Stack):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.embed(tokens)
            table = torch.linspace(0, 1, x.numel()).view_as(x).cos()
            for layer in self.layers:
                x = layer(x, table)
            return F.cross_entropy((self.norm(x) @ self.embed.weight.t()).flatten(0, 1), tokens.flatten())

    def make() -> WithTable:
        torch.manual_seed(0)
        return WithTable(make=Rotated)

    model = make()
    manager = offload(model)
    with manager:
        loss = model(ids())
    per_layer = [sum(1 for saved in lives(manager) if saved.module == f"layers.{i}") for i in range(3)]
    # each layer saves its input only: the linear's output is not needed, since the table needs no gradient
    assert per_layer == [1, 1, 1]
    del loss
    assert_equal(train(model, lambda step: model(ids(step)), manager), plain(make))


def test_a_tensor_subclass_passes_through(offload: Callable[..., memo.Manager]) -> None:
    """A quantised or otherwise clever tensor is kept as it is, not taken apart."""

    class Clever(torch.Tensor):
        pass

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(32, 32)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            scale = torch.full((2, 48, 32), 0.5).as_subclass(Clever)
            y = torch.Tensor.mul(self.linear(x).as_subclass(Clever), scale)
            return x + y.as_subclass(torch.Tensor)

    model = stack(make=Layer)
    manager = offload(model)
    got = train(model, lambda step: model(ids(step)), manager)
    assert_equal(got, plain(lambda: stack(make=Layer)))


@pytest.mark.parametrize(("budget", "ahead"), [(None, 1), ("1KiB", 1), ("1MiB", 2), ("1GiB", 6)])
def test_prefetch_depth_is_bounded_by_bytes(
    offload: Callable[..., memo.Manager], budget: str | None, ahead: int
) -> None:
    """One layer of 16 units is 196,608 bytes and some; a budget of zero layers still allows the one that overlaps."""
    model = stack(layers=9)
    manager = offload(model, min_bytes=4096)
    engine = manager._engine
    engine.reload_ahead(None if budget is None else parse_bytes(budget))
    deepest = 0
    reach = engine._homeward.reach

    def watch(group: Any) -> None:
        nonlocal deepest
        reach(group)
        waiting = {saved.group.index for saved in lives(manager) if saved.state.value in ("returning", "back")}
        deepest = max(deepest, len(waiting - {group.index}))

    engine._homeward.reach = watch  # type: ignore[method-assign]
    got = train(model, lambda step: model(ids(step)), manager, steps=2)
    assert_equal(got, plain(lambda: stack(layers=9), steps=2))
    if budget == "1MiB":
        assert deepest >= ahead
        assert deepest * 16 * 2 * 48 * 32 * 4 <= (1 << 20) + 2 * 16 * 2 * 48 * 32 * 4
    elif budget == "1GiB":
        assert deepest >= ahead
    else:
        assert deepest == ahead


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_compiled_layers(offload: Callable[..., memo.Manager], backend: str) -> None:
    def make() -> Stack:
        model = stack()
        for layer in model.layers:
            layer.compile(backend=backend)
        return model

    model = make()
    manager = offload(model)
    got = train(model, lambda step: model(ids(step)), manager)
    torch._dynamo.reset()
    assert_equal(got, plain(make))
    assert manager.stats.bytes_disk > 0


def test_device_memory_holds_two_layers_and_the_last(offload: Callable[..., memo.Manager]) -> None:
    model = stack(layers=12)
    manager = offload(model)
    train(model, lambda step: model(ids(step)), manager, steps=1)
    moved = manager.stats.bytes_disk + manager.stats.bytes_forwarded
    assert manager.stats.peak_device_bytes <= 0.25 * moved


def test_the_last_layer_is_not_moved_when_backward_follows_at_once(offload: Callable[..., memo.Manager]) -> None:
    model = stack(layers=4)
    manager = offload(model)
    train(model, lambda step: model(ids(step)), manager, steps=1)
    b, s, h = 2, 48, 32
    statistics = 2 * 2 * b * s * 4  # mean and rstd of two norms
    moved = manager.stats.bytes_disk / 3
    assert 16 * b * s * h * 4 <= moved <= 16 * b * s * h * 4 + statistics + 2 * b * s * 4


def test_backward_works_after_the_manager_itself_is_gone(tmp_path: Path) -> None:
    model, reference = stack(), stack()
    with memo.offload(model, alpha=1.0, disk=tmp_path, min_bytes=512):
        loss = model(ids())
    gc.collect()
    descriptors = set(os.listdir("/proc/self/fd"))
    loss.backward()
    reference(ids()).backward()
    assert all(torch.equal(a, b) for a, b in zip(gradients(model), gradients(reference), strict=True))
    del loss
    gc.collect()
    assert set(os.listdir("/proc/self/fd")) < descriptors, "the scratch file is closed with the last graph"


def test_a_model_compiled_as_a_whole(offload: Callable[..., memo.Manager]) -> None:
    model, reference = stack(), stack()
    compiled, plain_compiled = torch.compile(model, backend="aot_eager"), torch.compile(reference, backend="aot_eager")
    manager = offload(model)
    got = train(model, lambda step: compiled(ids(step)), manager)
    torch._dynamo.reset()
    assert_equal(got, train(reference, lambda step: plain_compiled(ids(step))))


def test_nesting_and_reuse_of_one_manager(offload: Callable[..., memo.Manager]) -> None:
    model = stack()
    manager = offload(model)
    with manager:
        with manager:
            loss = model(ids())
        loss = loss + model(ids(1))
    loss.backward()
    reference = stack()
    (reference(ids()) + reference(ids(1))).backward()
    assert all(torch.equal(a, b) for a, b in zip(gradients(model), gradients(reference), strict=True))


def test_hooks_are_off_the_model_outside_the_context(offload: Callable[..., memo.Manager]) -> None:
    model = stack()
    with offload(model):
        pass
    assert not any(layer._forward_hooks or layer._forward_pre_hooks for layer in model.layers)


def test_a_model_without_repeated_layers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NoRepeatedLayers, match="layers="):
        memo.offload(nn.Linear(3, 3), disk=tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"host": "8 gigs"}, "8 gigs"),
        ({"host": -1}, "negative"),
        ({"host": 0, "disk": []}, "nowhere"),
        ({"on_full": "explode"}, "explode"),
        ({"alpha": 2.0}, "alpha"),
        ({"disk": "/nonexistent/place"}, "/nonexistent/place"),
        ({"layers": [nn.Linear(1, 1)]}, "not a part"),
    ],
)
def test_bad_arguments_get_one_clear_line(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(MemoError, match=message) as caught:
        memo.offload(stack(), **{"disk": tmp_path, **options})
    assert "\n" not in str(caught.value)


def test_backward_after_close_raises(offload: Callable[..., memo.Manager]) -> None:
    model = stack()
    manager = offload(model)
    with manager:
        loss = model(ids())
    manager.close()
    with pytest.raises(SwapError, match="closed"):
        loss.backward()
    del loss
    with pytest.raises(MemoError, match="closed"), manager:
        pass


@pytest.mark.parametrize("full", ["spill", "raise"])
def test_a_full_host_tier_spills_or_raises_and_the_next_step_works(
    offload: Callable[..., memo.Manager], full: str
) -> None:
    model = stack()
    manager = offload(model, host="100KiB", on_full=full)
    if full == "raise":
        with pytest.raises(MemoError, match=r"host .* used of"), manager:
            model(ids())
        gc.collect()
        with manager, torch.no_grad():
            model(ids())
        return
    assert_equal(train(model, lambda step: model(ids(step)), manager), plain())
    assert manager.stats.spilled > 0
    assert manager.report().tiers[1].peak_bytes <= 100 << 10
