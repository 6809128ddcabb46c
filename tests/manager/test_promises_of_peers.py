"""What other packages' tests of activation offloading promise of saved tensors: which move, and how they come back.

Each case names the suite whose promise it is; the words and the code are ours. What they promise of a manager's life is in
test_promises_of_peers_life.py; docs/promises.md lists both.
"""

from __future__ import annotations

import gc
import sys
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import memo

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

TORCHTUNE = "torchtune: tests/torchtune/training/test_activation_offloading.py"
TRL = "TRL: tests/test_activation_offloading.py"
TE = "TransformerEngine: tests/pytorch/test_cpu_offloading.py"
MEGATRON = "Megatron-LM: tests/unit_tests/pipeline_parallel/test_pinned_activation_buffer.py"
DEEPSPEED = "DeepSpeed: tests/unit/runtime/activation_checkpointing/test_activation_checkpointing.py"
DEEPSPEED_OFFLOAD = "DeepSpeed: tests/unit/runtime/activation_checkpointing/test_offload_activations.py"

LAYERS, ROWS, WIDTH = 4, 64, 32
BYTES = ROWS * WIDTH * 4
HOST: dict[str, Any] = {"alpha": 1.0, "host": "64MiB", "disk": [], "min_bytes": 256}


def suite(name: str) -> Any:
    """Puts the suite whose promise a test is beside it, and into the test's id."""
    return pytest.mark.parametrize("promised_by", [pytest.param(name, id=name.split(":")[0])])


class Save(torch.autograd.Function):
    """Saves `make(x)` and multiplies the gradient by `use` of what comes back."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, make: Any, use: Any) -> torch.Tensor:
        made = make(x)
        ctx.save_for_backward(*(made if isinstance(made, tuple) else (made,)))
        ctx.use = use
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient * ctx.use(*ctx.saved_tensors), None, None


class Saving(nn.Module):
    """A layer with a parameter that saves one thing."""

    def __init__(self, make: Any, use: Any) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.make, self.use = make, use

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Save.apply(x + self.scale, self.make, self.use)


def layers_of(make: Callable[[], nn.Module]) -> nn.ModuleList:
    torch.manual_seed(0)
    return nn.ModuleList(make() for _ in range(LAYERS))


def source() -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()


def call(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = layer(x)
    return x


def step(
    layers: nn.ModuleList, manager: memo.Manager | None, forward: Callable[..., torch.Tensor] = call
) -> tuple[list[torch.Tensor | None], int]:
    """One step; returns output and gradients, and the bytes that were saved through the manager after forward."""
    x = source()
    layers.zero_grad()
    saved = 0
    if manager is None:
        out = forward(layers, x)
    else:
        with manager:
            out = forward(layers, x)
        saved = manager.stats.saved_bytes
    out.square().mean().backward()
    return [out.detach(), x.grad, *(p.grad for p in layers.parameters())], saved


def same(make: Callable[[], nn.Module], forward: Callable[..., torch.Tensor] = call, **options: Any) -> tuple[int, Any]:
    """Compares a step with and without memo; returns the bytes saved through it, and its counters."""
    reference, layers = layers_of(make), layers_of(make)
    want, _ = step(reference, None, forward)
    manager = memo.offload(layers, layers=layers, **{**HOST, **options})
    for _ in range(2):
        got, saved = step(layers, manager, forward)
        for a, b in zip(got, want, strict=True):
            assert (a is None) == (b is None)
            assert a is None or b is None or torch.equal(a, b)
    gc.collect()
    stats = manager.stats
    assert stats.live_entries == 0
    manager.close()
    return saved, stats


class Linears(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.register_buffer("shift", torch.randn(ROWS, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.relu(self.up(x)) * self.shift)


@pytest.mark.promise("P1")
@suite(TORCHTUNE)
@pytest.mark.parametrize("tier", ["host", "disk", "both"])
def test_a_step_is_the_one_without(promised_by: str, tier: str, tmp_path: Path) -> None:
    options = {"host": {}, "disk": {"host": 0, "disk": tmp_path}, "both": {"host": "16KiB", "disk": tmp_path}}[tier]
    saved, stats = same(Linears, **options)
    assert saved > 0
    assert stats.bytes_host + stats.bytes_disk > 0


class GivesView(torch.autograd.Function):
    """Its gradient is a view of what it saved."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x * 2)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return ctx.saved_tensors[0].t().t()


class HoldsOn(torch.autograd.Function):
    """Hands a gradient on, after it asked for other saved memory of the same size and gave copies time to run."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(torch.full_like(x, 5))
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        assert bool((ctx.saved_tensors[0] == 5).all())
        time.sleep(0.005)
        return gradient


class PassesView(nn.Module):
    """The gradient of `scale` is the sum of a view that the layer after it made, read behind reloads of this layer's own."""

    def __init__(self, *, checkpointed: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))
        self.checkpointed = checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = checkpoint(GivesView.apply, x, use_reentrant=False) if self.checkpointed else GivesView.apply(x)
        return HoldsOn.apply(HoldsOn.apply(x + self.scale))


@suite(TORCHTUNE)
@pytest.mark.parametrize("checkpointed", [False, True])
def test_a_restored_tensor_lives_as_long_as_views_that_backward_made_of_it(
    promised_by: str, checkpointed: bool
) -> None:
    saved, _ = same(lambda: PassesView(checkpointed=checkpointed))
    assert saved > 0


@pytest.mark.promise("R2")
@suite(TRL)
def test_a_tensor_and_its_views_move_once(promised_by: str) -> None:
    def views(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x * 3
        return y, y.view(-1), y.t(), y[ROWS // 2 :]

    def use(y: torch.Tensor, flat: torch.Tensor, turned: torch.Tensor, half: torch.Tensor) -> torch.Tensor:
        assert (flat.shape, turned.stride(), half.storage_offset()) == ((ROWS * WIDTH,), (1, WIDTH), ROWS // 2 * WIDTH)
        return y + flat.view_as(y) + turned.t() + half.sum()

    saved, stats = same(lambda: Saving(views, use))
    assert saved == LAYERS * BYTES
    assert stats.deduplicated == 2 * LAYERS * 3


@suite(TE)
def test_a_tensor_saved_three_times_moves_once(promised_by: str) -> None:
    saved, stats = same(lambda: Saving(lambda x: (y := x * 3, y, y), lambda a, b, c: a + b * c))
    assert saved == LAYERS * BYTES
    assert stats.bytes_host <= 2 * saved


@suite(TE)
def test_slices_whose_base_nobody_saves_move_the_base_once(promised_by: str) -> None:
    def halves(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x * 3
        return y[::2], y[1::2]

    saved, _ = same(lambda: Saving(halves, lambda a, b: torch.cat([a - b, b * 2])))
    assert saved == LAYERS * BYTES


@suite(MEGATRON)
@pytest.mark.parametrize(
    "view",
    [
        pytest.param(lambda y: y[:, : WIDTH - 8], id="part of each row"),
        pytest.param(lambda y: y[5:], id="an offset"),
        pytest.param(lambda y: y.t(), id="transposed"),
        pytest.param(lambda y: y[:, ::2], id="every second column"),
        pytest.param(lambda y: y[:1].expand(7, WIDTH), id="expanded"),
        pytest.param(lambda y: y.flatten().unfold(0, 8, 4), id="overlapping"),
        pytest.param(lambda y: y[:0], id="no rows"),
        pytest.param(lambda y: y[3, 4], id="a number"),
    ],
)
def test_a_view_comes_back_with_its_own_layout(view: Any, promised_by: str) -> None:
    layouts = []

    def make(x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = view(x * 3)
        layouts.append((made.shape, made.stride()))
        return made

    def use(back: torch.Tensor) -> torch.Tensor:
        assert (back.shape, back.stride()) == layouts[-1]
        return back.sum() + back.numel()

    saved, stats = same(lambda: Saving(make, use))
    assert saved == LAYERS * BYTES
    assert stats.bytes_host > 0


DTYPES = [
    torch.float64, torch.bfloat16, torch.float16, torch.complex64, torch.int64, torch.uint8, torch.bool,
    torch.float8_e4m3fn, torch.float8_e5m2,
]  # fmt: skip


@suite(f"{TE}; {MEGATRON}")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_number_format_moves_and_comes_back_as_it_was(dtype: torch.dtype, promised_by: str) -> None:
    def use(back: torch.Tensor) -> torch.Tensor:
        assert back.dtype == dtype
        return back.abs().float() if dtype.is_complex else back.float()

    saved, stats = same(lambda: Saving(lambda x: (x * 3).to(dtype), use))
    assert saved == LAYERS * ROWS * WIDTH * dtype.itemsize
    assert stats.bytes_host > 0


@pytest.mark.promise("R3")
@suite(TRL)
def test_parameters_and_buffers_and_views_of_them_stay(promised_by: str) -> None:
    class Weights(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(ROWS, WIDTH))
            self.register_buffer("shift", torch.randn(ROWS, WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = Save.apply(x, lambda x: (self.weight.t(), self.weight[3:], self.shift[:5]), lambda *s: s[0].sum())
            return x + self.weight

    saved, stats = same(Weights)
    assert saved == 0
    assert stats.bytes_host == 0


@suite(TRL)
def test_tensors_below_the_smallest_size_stay(promised_by: str) -> None:
    def sizes(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x[:4] * 2, x * 2

    saved, stats = same(lambda: Saving(sizes, lambda small, large: large + small.sum()), min_bytes=4 * WIDTH * 4 + 1)
    assert saved == LAYERS * BYTES
    assert 0 < stats.bytes_host <= 2 * saved


@suite(f"{TE}; {DEEPSPEED_OFFLOAD}")
@pytest.mark.parametrize("marked", [False, True])
def test_a_marked_tensor_stays_and_others_move(marked: bool, promised_by: str) -> None:
    def make(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = x * 2
        return memo.keep(y) if marked else y, x * 3

    _, stats = same(lambda: Saving(make, lambda a, b: a + b))
    moved = stats.bytes_host / (2 * BYTES)
    assert 0 < moved <= LAYERS if marked else moved > LAYERS


@pytest.mark.promise("R2")
@suite(TRL)
def test_memory_that_is_used_again_is_not_taken_for_what_it_held(promised_by: str) -> None:
    """A layer's tensor takes the address of one that an earlier layer has saved and the engine has dropped.

    Tensors lie in buffers of the test's own, since malloc promises nobody the same address: a tensor holds its buffer.
    """
    buffers = [bytearray(BYTES) for _ in range(3 * LAYERS)]
    before: set[int] = set()  # numbers of the buffers of this forward
    again = []

    def make(x: torch.Tensor) -> torch.Tensor:
        if len(again) % LAYERS == 0:
            before.clear()
        time.sleep(0.1 if before else 0)  # for the copies of earlier layers
        free = [number for number in range(len(buffers)) if sys.getrefcount(buffers[number]) == 2]
        number = min(free, key=lambda number: number not in before)
        again.append(number in before)
        before.add(number)
        return torch.frombuffer(buffers[number], dtype=x.dtype).view(x.shape).copy_(x * 7)

    saved, stats = same(lambda: Saving(make, lambda back: back))
    assert any(again)
    assert saved == LAYERS * BYTES
    assert stats.deduplicated == 0


@pytest.mark.promise("R4")
@suite(DEEPSPEED)
def test_a_saved_tensor_that_was_changed_is_an_error_that_says_so(promised_by: str) -> None:
    layers = layers_of(Linears)
    with memo.offload(layers, layers=layers, **HOST) as manager:
        x = source() * 1
        out = call(layers, x)
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(memo.MemoError, match="in place"):
        out.sum().backward()
    manager.close()


class Masked(nn.Module):
    """More outputs than inputs, a keyword, and things that are no tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor, *, scale: Any, note: Any = None) -> tuple[Any, ...]:
        out = torch.sigmoid(self.linear(x)) * mask.type_as(x) * scale
        return x * 2, out, mask, note


@pytest.mark.covering(2)
@suite(DEEPSPEED)
@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("alpha", [1.0, 0.0])
@pytest.mark.parametrize("note", [None, 2, True, (None, 2.5), "tensor"], ids=str)
@pytest.mark.parametrize("mask", ["bool", "float"])
def test_arguments_and_results_pass_as_they_are(
    mask: str, note: Any, alpha: float, checkpointed: bool, promised_by: str
) -> None:
    kept = torch.ones(ROWS, WIDTH, dtype=torch.bool).tril()
    given = kept if mask == "bool" else kept.float()
    value = (None, True, torch.ones(3)) if note == "tensor" else note

    def forward(layers: nn.ModuleList, x: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            run = partial(checkpoint, layer, use_reentrant=False) if checkpointed else layer
            other, x, mask_back, note_back = run(x, given, scale=1.5, note=value)
            assert mask_back is given
            assert note_back is value
            x = x + other
        return x

    same(Masked, forward, alpha=alpha)
