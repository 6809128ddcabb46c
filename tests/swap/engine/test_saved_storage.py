"""Storages that move, and their form when they come back: views, parts, casts, and tensors that are more than bytes."""

from __future__ import annotations

import contextlib
import itertools
from typing import TYPE_CHECKING, Any

import pytest
import torch
from small_models import Stack, assert_equal, gradients, ids, lives, plain, stack, train
from torch import nn
from torch.nn import functional as F

import memo
from memo.swap.engine.saved_storage import _NEXT, SavedStorage, State

if TYPE_CHECKING:
    from collections.abc import Callable


@pytest.mark.promise("R11")
@pytest.mark.parametrize(("before", "after"), [*itertools.product(State, repeat=2)])
def test_a_state_follows_by_the_table_alone_and_each_change_is_told(before: State, after: State) -> None:
    told: list[State] = []
    group: Any = None
    storage = SavedStorage(torch.ones(4), 16, (0, None), group, 0, lambda _: None, lambda it: told.append(it.state))
    storage.state = before
    if after in _NEXT[before]:
        storage.move_to(after)
        assert (storage.state, told) == (after, [after])
    else:
        with pytest.raises(AssertionError, match="cannot go"):
            storage.move_to(after)
        assert (storage.state, told) == (before, [])


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


class Spectral(nn.Module):
    """Saves a complex tensor, and then a conjugated and a negated view of the same bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        z = torch.complex(y.tanh(), y.sin()).exp()
        conjugate = z.conj()
        return (z * conjugate * conjugate).real / 8 + conjugate.imag.sin()


class Gates(nn.Module):
    """Gates of one storage, each changed in place before it is saved: parts made by `unsafe_chunk` have a version each."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 96)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        reset, update, new = self.linear(x).unsafe_chunk(3, -1)
        kept = reset.sigmoid_() * x
        kept = update.transpose(1, 2).sigmoid_() * kept.transpose(1, 2)
        return x + new.tanh_() * kept.transpose(1, 2)


class Recurrent(nn.Module):
    """torch's own cell does so on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.GRU(32, 32, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.cell(x)[0]  # type: ignore[no-any-return]


class Nested(nn.Module):
    """Saves a nested tensor, whose sizes are no numbers, over bytes of which a plain view is saved too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        nested = torch.nested.as_nested_tensor(list(y.sin().unbind()))
        return torch.nested.to_padded_tensor(nested * nested, 0.0)


@pytest.mark.filterwarnings("ignore:layers.0 moves whole tensors:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage:UserWarning")
@pytest.mark.parametrize("kind", [Spectral, Gates, Recurrent, Nested])
@pytest.mark.parametrize("alpha", [1.0, 0.25])
def test_one_storage_saved_as_several_things(
    offload: Callable[..., memo.Manager], kind: type[nn.Module], alpha: float
) -> None:
    model = stack(make=kind)
    manager = offload(model, alpha=alpha)
    assert_equal(train(model, lambda step: model(ids(step)), manager), plain(lambda: stack(make=kind)))
    assert manager.stats.bytes_host + manager.stats.bytes_disk > 0


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
