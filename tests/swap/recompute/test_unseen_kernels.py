"""Kernels that the dispatcher does not see (NumPy stands in for Triton and extensions) cost no gradient: what they write is
kept and never repeated, and the rest of their layer is divided.

Each kernel here uses the largest number of all tokens, which lies elsewhere in the last step.
"""

from __future__ import annotations

import copy
import functools
import warnings
from typing import TYPE_CHECKING, Any

import numpy
import pytest
import torch
from small_models import gradients
from torch import nn
from torch.nn import functional as F

import memo
from memo.swap import Level

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

HIDDEN, TOKENS = 32, 256
LARGEST_AT = (200, 200, 200, 3)


def round_to_largest(a: numpy.ndarray, out: numpy.ndarray) -> None:
    """The kernel: a scale for all tokens."""
    scale = numpy.abs(a).max() / 127
    numpy.copyto(out, numpy.round(a / scale) * scale)


class Rounds(torch.autograd.Function):
    """Into memory that `make` gives."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, make: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        out = make(x)
        round_to_largest(x.detach().numpy(), out.numpy())
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0], None


class Scales(torch.autograd.Function):
    """By a number that a kernel puts into memory of one element."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, make: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        largest = make(x)
        largest.numpy()[...] = numpy.abs(x.detach().numpy()).max()
        ctx.save_for_backward(largest)
        return x / largest

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0] / ctx.saved_tensors[0], None


class RoundsInPlace(torch.autograd.Function):
    """And says so to autograd."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        round_to_largest(x.detach().numpy(), x.detach().numpy())
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0]


class Layer(nn.Module):
    def __init__(self, strange: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(HIDDEN, 128), nn.LayerNorm(128), nn.Linear(128, HIDDEN)
        self.strange = strange

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.norm(F.gelu(self.up(self.strange(x)))))  # type: ignore[no-any-return]


def batch(largest_at: int) -> torch.Tensor:
    x = torch.randn(1, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(5))
    x[0, largest_at] = 0.0
    x[0, largest_at, 0] = 40.0
    return x


def step_is_equal(plain: nn.Module, ours: nn.Module, manager: memo.Manager, step: int) -> None:
    for model in (plain, ours):
        model.zero_grad()
    plain(batch(3)).square().mean().backward()
    with manager:
        loss = ours(batch(3)).square().mean()
    loss.backward()
    for want, got in zip(gradients(plain), gradients(ours), strict=True):
        assert torch.equal(want, got), f"step {step}"  # type: ignore[arg-type]


def steps_are_equal(
    strange: Callable[[torch.Tensor], torch.Tensor], alpha: float, tmp_path: Path
) -> tuple[set[str], int]:
    """Why layers moved whole, and how many bytes were recomputed, over steps whose gradients are the plain run's."""
    torch.manual_seed(0)
    plain = nn.Sequential(*[Layer(strange) for _ in range(3)])
    ours = copy.deepcopy(plain)
    manager = memo.offload(ours, layers=list(ours), alpha=alpha, disk=tmp_path, min_bytes=256)
    for step, largest_at in enumerate(LARGEST_AT):
        for model in (plain, ours):
            model.zero_grad()
        plain(batch(largest_at)).square().mean().backward()
        with manager, warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*whole")
            loss = ours(batch(largest_at)).square().mean()
        loss.backward()
        for want, got in zip(gradients(plain), gradients(ours), strict=True):
            assert torch.equal(want, got), f"step {step}"  # type: ignore[arg-type]
    use = manager.report().recompute
    assert use is not None
    manager.close()
    return set(use.refused.values()), manager.stats.bytes_recomputed


ALLOCATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "empty_like": torch.empty_like,
    "empty": lambda x: torch.empty(x.shape),
    "new_empty": lambda x: x.new_empty(x.shape),
    "empty_strided": lambda x: torch.empty_strided(x.shape, x.stride()),
    "empty_permuted": lambda x: torch.empty_permuted(x.shape, (0, 1, 2)),
    "resize_": lambda x: torch.empty(0).resize_(x.shape),
    "resize_ of zeros": lambda x: torch.zeros_like(x).resize_(x.shape),
    "half of it": lambda x: (y := torch.empty_like(x), y[..., :16].zero_())[0],
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("alpha", [0.0, 0.3])
@pytest.mark.parametrize("how", ALLOCATIONS)
def test_memory_that_an_unseen_kernel_fills_is_kept(how: str, alpha: float, tmp_path: Path) -> None:
    reasons, recomputed = steps_are_equal(lambda x: Rounds.apply(x, ALLOCATIONS[how]), alpha, tmp_path)
    assert reasons == set()
    assert recomputed > 0


@pytest.mark.parametrize("alpha", [0.0, 0.3])
def test_one_number_that_an_unseen_kernel_makes_of_all_tokens_is_kept(alpha: float, tmp_path: Path) -> None:
    reasons, recomputed = steps_are_equal(lambda x: Scales.apply(x, lambda x: torch.empty(1)), alpha, tmp_path)
    assert reasons == set()
    assert recomputed > 0


IN_PLACE: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "a copy": lambda x: Rounds.apply(x, torch.clone),
    "zeros": lambda x: Rounds.apply(x, torch.zeros_like),
    "memory that was zeroed": lambda x: Rounds.apply(x, lambda x: torch.empty_like(x).zero_()),
    "one number": lambda x: Scales.apply(x, lambda x: torch.zeros(1)),
    "what autograd is told of": lambda x: RoundsInPlace.apply(x.clone()),
}


@pytest.mark.covering(1)
@pytest.mark.parametrize("alpha", [0.0, 0.3])
@pytest.mark.parametrize("what", IN_PLACE)
def test_what_an_operator_filled_and_an_unseen_kernel_overwrites_is_kept(
    what: str, alpha: float, tmp_path: Path
) -> None:
    reasons, recomputed = steps_are_equal(IN_PLACE[what], alpha, tmp_path)
    assert reasons == set()
    assert recomputed > 0


class Weighed(Layer):
    """Adds what a kernel wrote over zeros, times a number that is zero at first: then no result tells of it."""

    weight = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.up(x))
        y = y + Weighed.weight * Rounds.apply(y, torch.zeros_like)
        return x + self.down(F.gelu(y[:, : self.rows]).sum(1, keepdim=True) + F.gelu(y))  # type: ignore[no-any-return]

    rows = TOKENS


@pytest.mark.parametrize("paths", [False, True], ids=["", "another path in each step"])
def test_a_kernel_that_once_overwrote_is_remembered(paths: bool, tmp_path: Path) -> None:
    """The first call alone is recorded with checksums, and later trials see no difference while the weight is zero."""
    torch.manual_seed(0)
    plain = nn.Sequential(*[Weighed(lambda x: x) for _ in range(3)])
    ours = copy.deepcopy(plain)
    manager = memo.offload(ours, layers=list(ours), alpha=0.0, disk=tmp_path, min_bytes=256)
    for step, weight in enumerate((0.0, 0.0, 0.0, 1.0, 1.0)):
        Weighed.weight = weight
        Weighed.rows = TOKENS - 8 * min(step, 2) if paths else TOKENS
        step_is_equal(plain, ours, manager, step)
    assert manager.stats.bytes_recomputed > 0
    manager.close()


@pytest.mark.parametrize("alpha", [0.0, 0.3])
def test_a_layer_whose_kernel_is_memoized_is_divided(alpha: float, tmp_path: Path) -> None:
    memoized = memo.memoize(lambda x: Rounds.apply(x, torch.empty_like))
    reasons, recomputed = steps_are_equal(memoized, alpha, tmp_path)
    assert reasons == set()
    assert recomputed > 0


def copied(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x).copy_(x.sin())


def in_halves(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    out[..., :16] = x[..., 16:]
    out[..., 16:] = -x[..., :16]
    return out


def by_turns(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    out[..., 0::2], out[..., 1::2] = -x[..., 1::2], x[..., 0::2]
    return out


def as_a_result(x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        tripled = torch.add(x, x, alpha=2, out=torch.empty_like(x))
    return x * tripled


def zeroed(x: torch.Tensor) -> torch.Tensor:
    return x + torch.empty_like(x).zero_()


def emptied_before(x: torch.Tensor) -> torch.Tensor:
    return x.sin() + torch.zeros_like(torch.empty_like(x))


@pytest.mark.covering(1)
@pytest.mark.parametrize("alpha", [0.0, 0.3])
@pytest.mark.parametrize("fills", [copied, in_halves, by_turns, as_a_result, zeroed, emptied_before])
def test_memory_that_operators_fill_is_proven(
    fills: Callable[[torch.Tensor], torch.Tensor], alpha: float, tmp_path: Path
) -> None:
    reasons, recomputed = steps_are_equal(fills, alpha, tmp_path)
    assert reasons == set()
    assert recomputed > 0


class WeighedWhereShort(Weighed):
    """The kernel runs for fewer tokens alone, as one that is chosen by the shape."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.up(x))
        if x.size(1) < TOKENS:
            y = y + Weighed.weight * Rounds.apply(y, torch.zeros_like)
        return x + self.down(F.gelu(y))  # type: ignore[no-any-return]


@pytest.mark.parametrize("how", [{"alpha": 0.0}, {"levels": dict.fromkeys(range(3), Level.SAVE_INPUT)}], ids=str)
def test_a_kernel_that_overwrites_in_calls_of_another_shape_alone_is_found(how: dict[str, Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*[WeighedWhereShort(lambda x: x) for _ in range(3)])
    ours = copy.deepcopy(plain)
    manager = memo.offload(ours, layers=list(ours), disk=tmp_path, min_bytes=256, **how)
    for step, (tokens, weight) in enumerate([(TOKENS, 0.0), (TOKENS, 0.0), (128, 0.0), (128, 0.0), (128, 1.0)]):
        Weighed.weight = weight
        for model in (plain, ours):
            model.zero_grad()
        plain(batch(3)[:, :tokens]).square().mean().backward()
        with manager:
            loss = ours(batch(3)[:, :tokens]).square().mean()
        loss.backward()
        for want, got in zip(gradients(plain), gradients(ours), strict=True):
            assert torch.equal(want, got), f"step {step}"  # type: ignore[arg-type]
    assert manager.stats.bytes_recomputed > 0
    manager.close()


class WeighedAndCounted(Weighed):
    """The kernel adds to what nothing has read yet, and torch counts that it writes."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.up(x))
        made = y.detach() * 0.5
        with torch._C._DisableTorchDispatch():
            made.data.add_(Weighed.weight * y.detach().abs().max())
        torch.autograd.graph.increment_version(made)
        return x + self.down(F.gelu(y) * made.cos())  # type: ignore[no-any-return]


@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_a_counted_write_into_what_nothing_has_read_is_found_though_it_changes_nothing_at_first(
    alpha: float, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*[WeighedAndCounted(lambda x: x) for _ in range(3)])
    ours = copy.deepcopy(plain)
    manager = memo.offload(ours, layers=list(ours), alpha=alpha, disk=tmp_path, min_bytes=256)
    for step, weight in enumerate((0.0, 0.0, 0.5)):
        Weighed.weight = weight
        step_is_equal(plain, ours, manager, step)
    assert manager.stats.bytes_recomputed > 0
    manager.close()


class RoundsForTheNext(nn.Module):
    """An operator fills one half of some memory, which autograd saves; the kernel fills the other, which is returned."""

    def __init__(self, make: Callable[..., torch.Tensor], late: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 8), nn.Linear(8, HIDDEN)
        self.make, self.late = make, late

    def forward(self, given: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        x, *rounded = given
        y = functools.reduce(torch.mul, rounded, self.up(x).sin())
        halves = self.make(2, *y.shape)
        if not self.late:
            round_to_largest(y.detach().numpy(), halves[1].numpy())
        y = y * torch.mul(y.detach(), 2, out=halves[0])
        if self.late:
            round_to_largest(y.detach().numpy(), halves[1].numpy())
        return x + self.down(y), halves[1]


@pytest.mark.parametrize("alpha", [0.0, 0.5])
@pytest.mark.parametrize(("make", "late"), [(torch.empty, False), (torch.zeros, True)], ids=["fills", "overwrites"])
def test_what_an_unseen_kernel_writes_and_the_next_layer_alone_reads_is_kept(
    make: Callable[..., torch.Tensor], late: bool, alpha: float, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(*[RoundsForTheNext(make, late) for _ in range(3)])
    ours = copy.deepcopy(plain)
    manager = memo.offload(ours, layers=list(ours), alpha=alpha, disk=tmp_path, min_bytes=256)
    for step in range(2):
        for model in (plain, ours):
            model.zero_grad()
        plain((batch(3),))[0].square().mean().backward()
        with manager:
            loss = ours((batch(3),))[0].square().mean()
        loss.backward()
        for want, got in zip(gradients(plain), gradients(ours), strict=True):
            assert torch.equal(want, got), f"step {step}"  # type: ignore[arg-type]
    assert manager.stats.bytes_recomputed > 0
    manager.close()
