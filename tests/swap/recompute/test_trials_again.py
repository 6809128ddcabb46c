"""What begins after a layer's first call is found at its 2nd, 10th, 100th call, at larger sizes, or at once by `verify`."""

from __future__ import annotations

import warnings
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import pytest
import torch
from small_models import gradients
from torch import nn
from torch.nn import functional as F

import memo
from memo.swap import Level

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HIDDEN = 16


class Late:
    """Something that begins in a later step, in the run with memo and in the one without."""

    begun = False


@pytest.fixture(autouse=True)
def _not_begun_after() -> Iterator[None]:
    yield
    Late.begun = False


def overwrites(x: torch.Tensor) -> torch.Tensor:
    """Writes through NumPy into what an operator made."""
    seen = x.detach().numpy()
    if Late.begun:
        seen[..., 0] = 3.0
    return x


@memo.recomputable
def factor(x: torch.Tensor) -> torch.Tensor:
    """Another one in a replay, once it has begun."""
    return x.detach() * (2.0 if Late.begun and not torch.is_grad_enabled() else 1.0)


@memo.recomputable
def factor_of_many(x: torch.Tensor) -> torch.Tensor:
    """Another one in a replay with many rows."""
    return x.detach() * (2.0 if x.shape[1] > 8 and not torch.is_grad_enabled() else 1.0)


def drifts(x: torch.Tensor) -> torch.Tensor:
    return x * factor(x)


def drifts_where_large(x: torch.Tensor) -> torch.Tensor:
    return x * factor_of_many(x)


class Layer(nn.Module):
    def __init__(self, strange: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.strange = nn.Linear(HIDDEN, 64), nn.Linear(64, HIDDEN), strange

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.strange(self.up(x))).square())  # type: ignore[no-any-return]


def made(strange: Callable[[torch.Tensor], torch.Tensor]) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Layer(strange) for _ in range(2)])


def step(model: nn.Module, manager: memo.Manager | None, rows: int) -> list[Any]:
    x = torch.randn(2, rows, HIDDEN, generator=torch.Generator().manual_seed(5))
    model.zero_grad()
    if manager is None:
        loss = model(x).square().mean()
    else:
        with manager:
            loss = model(x).square().mean()
    loss.backward()
    return [loss, *gradients(model)]


def runs(
    strange: Callable[[torch.Tensor], torch.Tensor],
    *,
    steps: int,
    begins: int = 0,
    rows: Callable[[int], int] = lambda number: 8,
    **options: Any,
) -> tuple[list[int], dict[int, str], list[int]]:
    """Steps, from 1, with other gradients than without memo; warnings by step; and trials so far after each step."""
    plain, ours = made(strange), made(strange)
    manager = memo.offload(ours, layers=list(ours), host="8MiB", min_bytes=0, alpha=0.0, **options)
    wrong, told, trials = [], {}, []
    for number in range(1, steps + 1):
        Late.begun = 0 < begins <= number
        want = step(plain, None, rows(number))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            got = step(ours, manager, rows(number))
        told |= {number: str(caught[0].message)} if caught else {}
        if not all(map(torch.equal, want[1:], got[1:])):
            wrong.append(number)
        use = manager.report().recompute
        assert use is not None
        trials.append(use.trials)
    manager.close()
    return wrong, told, trials


def test_recomputes_are_tried_again_at_the_second_tenth_and_hundredth_call() -> None:
    wrong, told, trials = runs(lambda x: x, steps=101)
    assert (wrong, told) == ([], {})
    each = trials[0]
    at = [number for number, (before, after) in enumerate(zip([0, *trials], trials, strict=False), 1) if after > before]
    assert at == [1, 2, 10, 100]
    assert trials[-1] == 4 * each


@pytest.mark.parametrize("strange", [overwrites, drifts], ids=["overwrites", "drifts"])
def test_what_begins_late_is_told_at_the_tenth_call_and_right_from_then_on(strange: Any) -> None:
    wrong, told, _ = runs(strange, steps=12, begins=3)
    assert wrong == [3, 4, 5, 6, 7, 8, 9]
    assert list(told) == [10]
    assert "Gradients of this layer's 7 calls before this one may be wrong" in told[10]


@pytest.mark.parametrize("strange", [overwrites, drifts], ids=["overwrites", "drifts"])
def test_verify_finds_what_begins_late_in_the_call_in_which_it_begins(strange: Any) -> None:
    assert runs(strange, steps=6, begins=3, verify=True)[:2] == ([], {})


@pytest.mark.parametrize("strange", [overwrites, drifts], ids=["overwrites", "drifts"])
def test_what_begins_in_the_second_call_is_found_there(strange: Any) -> None:
    assert runs(strange, steps=4, begins=2)[:2] == ([], {})


def test_a_recompute_is_tried_again_at_larger_sizes() -> None:
    assert runs(drifts_where_large, steps=8, rows=lambda number: 8 if number < 5 else 64)[:2] == ([], {})


@memo.recomputable
def local_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.linear(x, weight)


def distance(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.cdist(x[0], weight, compute_mode="use_mm_for_euclid_dist")[None]


class Precise(nn.Module):
    """Computes a product in a lower precision from its third call on, and puts the precision back, or does not."""

    def __init__(self, product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], *, puts_back: bool) -> None:
        super().__init__()
        self.up, self.down, self.calls, self.puts_back = nn.Linear(HIDDEN, 64), nn.Linear(64, HIDDEN), 0, puts_back
        self.product = product

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        before = torch.get_float32_matmul_precision()
        up = self.up(x)
        torch.set_float32_matmul_precision("medium" if self.calls > 2 else before)
        up = self.product(up.sin(), self.down.weight)
        if self.puts_back:
            torch.set_float32_matmul_precision(before)
        return x + self.down(F.linear(up, self.up.weight).sin())  # type: ignore[no-any-return]


def _product(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A product as a GPU computes it: to the bits that the precision in force asks for."""
    if torch.get_float32_matmul_precision() == "medium":
        x, y = x.bfloat16().float(), y.bfloat16().float()
    return (x.unsqueeze(2) * y.unsqueeze(0)).sum(1)


@pytest.mark.covering(2)
@pytest.mark.parametrize("puts_back", [True, False])
@pytest.mark.filterwarnings("ignore:Warning only once for all operators")
@pytest.mark.parametrize("how", [{"alpha": 0.5}, {"levels": dict.fromkeys(range(2), Level.SAVE_INPUT)}], ids=str)
@pytest.mark.parametrize("product", [F.linear, local_product, distance])
def test_a_precision_that_begins_within_a_later_call_is_seen_there(
    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], how: dict[str, Any], puts_back: bool
) -> None:
    def run(managed: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*[Precise(product, puts_back=puts_back) for _ in range(2)])
        manager = memo.offload(model, layers=[*model], min_bytes=1, **how) if managed else nullcontext()
        found = []
        for _ in range(5):
            with manager:
                loss = model(torch.linspace(0, 1, 8 * HIDDEN).view(1, 8, HIDDEN)).square().mean()
            torch.set_float32_matmul_precision("highest")
            loss.backward()
            found += gradients(model)
            model.zero_grad()
        if managed:
            assert manager.stats.bytes_recomputed > 0  # type: ignore[union-attr]
            manager.close()  # type: ignore[union-attr]
        return found

    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("mm", _product, "CPU", allow_override=True)
        try:
            want = run(managed=False)
            assert not all(map(torch.equal, want, want[-len(want) // 5 :]))
            assert all(map(torch.equal, run(managed=True), want))
        finally:
            torch.set_float32_matmul_precision("highest")


class Flushing(nn.Module):
    """Makes numbers so small that they are flushed to zero within the layer, and not in a replay; of zero nothing is."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, HIDDEN, bias=False), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up = self.up(x).tanh()
        torch.set_flush_denormal(True)
        small = (up * 1e-38).mul(0.5)
        torch.set_flush_denormal(False)
        return x + self.down(up + (small * 1e38).sin())  # type: ignore[no-any-return]


@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="this processor flushes no small numbers")
@pytest.mark.parametrize("calls", [((8, 1), (8, 0), (12, 1)), ((8, 0), (8, 1)), ((8, 0), (12, 1))], ids=str)
@pytest.mark.parametrize("alpha", [0.0, 0.5])
def test_a_call_of_zeros_proves_nothing(calls: tuple[tuple[int, int], ...], alpha: float) -> None:
    def run(managed: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(Flushing(), Flushing())
        manager = memo.offload(model, layers=[*model], alpha=alpha, min_bytes=1) if managed else nullcontext()
        found = []
        for tokens, factor in calls:
            with manager:
                loss = model(torch.linspace(1, 2, tokens * HIDDEN).view(1, tokens, HIDDEN) * factor).square().mean()
            loss.backward()
            found += gradients(model)
            model.zero_grad()
        if managed:
            assert manager.stats.bytes_recomputed > 0  # type: ignore[union-attr]
            manager.close()  # type: ignore[union-attr]
        return found

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert all(map(torch.equal, run(managed=True), run(managed=False)))


class Denormals(nn.Module):
    """Flushes small numbers to zero from its third call on, and leaves it so."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.calls = nn.Linear(HIDDEN, 64), nn.Linear(64, HIDDEN), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls > 2:
            torch.set_flush_denormal(True)
        small = (self.up(x).tanh() * 1e-38).mul(0.5)
        return x + self.down((small * 1e38).sin())  # type: ignore[no-any-return]


class OneThread(nn.Module):
    """Sums in one thread, in each call; only large sums are cut by threads."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(HIDDEN, 64), nn.Linear(64, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        torch.set_num_threads(1)
        return x + self.down((self.up(x) * (x.flatten() * 1.1).sum()).sin())  # type: ignore[no-any-return]


@pytest.mark.parametrize(("kind", "lengths"), [(Denormals, (8,) * 4), (OneThread, (2000, 2000, 2100, 2100))])
def test_settings_that_a_layer_leaves_in_force_hold_for_its_replays(
    kind: type[nn.Module], lengths: tuple[int, ...]
) -> None:
    threads = torch.get_num_threads()

    def run(managed: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model, found = nn.Sequential(kind(), kind()), []
        manager = memo.offload(model, layers=[*model], alpha=0.0, min_bytes=1) if managed else nullcontext()
        for length in lengths:
            torch.set_flush_denormal(False)
            torch.set_num_threads(2)
            with manager:
                loss = model(torch.randn(1, length, HIDDEN, generator=torch.Generator().manual_seed(length))).square()
            loss.mean().backward()
            found += gradients(model)
            model.zero_grad()
        return found

    try:
        assert all(map(torch.equal, run(managed=True), run(managed=False)))
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(threads)


@pytest.mark.parametrize("how", [{"alpha": 0.0}, {"alpha": 0.5}], ids=str)
def test_an_input_that_a_layer_gives_up_is_not_read(how: dict[str, Any]) -> None:
    class GivesUp(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(HIDDEN, 64), nn.Linear(64, HIDDEN)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = x.detach().clone()
            x.untyped_storage().resize_(0)
            return self.down(self.up(y).sin())  # type: ignore[no-any-return]

    torch.manual_seed(0)
    model = nn.Sequential(GivesUp(), GivesUp())
    with memo.offload(model, layers=[*model], min_bytes=1, **how):
        model(torch.ones(1, 8, HIDDEN).requires_grad_()).sum().backward()
    assert model[1].up.weight.grad.abs().sum() > 0


def test_an_input_that_is_always_zero_is_not_tried_for_good() -> None:
    model = nn.Sequential(Flushing(), Flushing())
    manager = memo.offload(model, layers=[*model], alpha=0.0, min_bytes=1)
    trials = []
    for _ in range(9):
        with manager:
            x = model[0](torch.zeros(1, 8, HIDDEN))
            model[1](x).sum().backward()
        trials.append(manager.report().recompute.trials)
    assert trials[-1] == trials[4]
