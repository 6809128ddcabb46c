"""examples/save_on_cpu_overlapped.py: gradients are those without it, bit for bit; budgets hold; nothing is left behind."""

from __future__ import annotations

import ast
import contextlib
import gc
import itertools
import random
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from run_examples import EXAMPLES, example, run
from small_models import Block, Stack
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

SCRIPT = EXAMPLES / "save_on_cpu_overlapped.py"
MIB = 1 << 20
KIB64 = 64 << 10  # bytes of a tensor of 128 x 128 float32

module = example("save_on_cpu_overlapped")


def offloading(host_bytes: int = 64 * MIB, *, min_bytes: int = 1, window_bytes: int = 0, **options: Any) -> Any:
    return module.save_on_cpu_overlapped(
        host_bytes, min_bytes=min_bytes, window_bytes=window_bytes, device="cpu", **options
    )


def square(seed: int = 0, *, grad: bool = True) -> Tensor:
    """128 x 128 random numbers; with `grad`, the result of an operator."""
    values = torch.randn(128, 128, generator=torch.Generator().manual_seed(seed))
    return values.requires_grad_() * 1 if grad else values


def is_empty(stats: Any) -> bool:
    return (stats.live, stats.host_bytes, stats.device_bytes) == (0, 0, 0)


# Programs: each takes a context for its forward and returns the loss and gradients.


class Doubled(torch.autograd.Function):
    """Saves an argument and its result."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x * 2
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        x, y = ctx.saved_tensors
        return grad * 2 + x + y


def of_function(
    function: Callable[[Tensor], Tensor], dtype: torch.dtype = torch.float32
) -> Callable[[Any], list[Tensor]]:
    def program(around: Any) -> list[Tensor]:
        torch.manual_seed(1)
        x = square(grad=False).to(dtype).requires_grad_()
        with around:
            loss = function(x).abs().sum()
        loss.backward()
        assert x.grad is not None
        return [loss.detach(), x.grad]

    return program


def of_model(make: Callable[[], nn.Module], *inputs: Tensor, **options: Any) -> Callable[[Any], list[Tensor]]:
    """Two steps of SGD."""

    def program(around: Any) -> list[Tensor]:
        torch.manual_seed(1)
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = []
        for _ in range(2):
            optimizer.zero_grad()
            with around, torch.autocast("cpu", torch.bfloat16, **{"enabled": False, **options}):
                loss = model(*inputs).float().square().mean()
            loss.backward()
            losses.append(loss.detach())
            optimizer.step()
        return losses + [parameter.detach() for parameter in model.parameters()]

    return program


class Checkpointed(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


def overlapping(x: Tensor) -> Tensor:
    windows = (x * 1).as_strided((100, 3, 128), (1, 128, 7), 50)
    return windows.sin() * windows


def expanded(x: Tensor) -> Tensor:
    row = (x * 1)[3:4, 1::2]
    return (row.expand(64, -1).sin() @ x.t()[::2]).exp()


def fused(x: Tensor) -> Tensor:
    q, k, v = (x * 3).chunk(3, -1)[:3]
    return (q.sin() @ k.t().cos() @ v).tanh() + v.exp().sum()


def penalised(x: Tensor) -> Tensor:
    y = (x * 1).sin().pow(3)
    (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y + grad.square()


def complex_parts(x: Tensor) -> Tensor:
    z = torch.view_as_complex((x * 1).unflatten(1, (64, 2)))
    return (z * z.conj()).exp().abs() + z.real.sin() * z.imag + torch.view_as_real(z * z).sum(-1)


def changed_between_saves(x: Tensor) -> Tensor:
    h = x * 1
    unused = h.sin()
    between = (x * 2).exp()  # its save sends the copy
    h.add_(1)
    return h.cos() + between + 0 * unused.detach()


def parts_with_counters_of_their_own(x: Tensor) -> Tensor:
    left, right = (x * 1).unsafe_chunk(2, 1)
    left.mul_(2)
    y = left.sin()
    between = (x * 2).exp()  # its save sends the copy
    right.mul_(3)
    return y + right.sin() + between.sum()


IDS = torch.randint(61, (2, 48), generator=torch.Generator().manual_seed(0))
IMAGE = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0)).to(memory_format=torch.channels_last)

PROGRAMS = {
    "tied": of_model(Stack, IDS),
    "autocast": of_model(Stack, IDS, enabled=True),
    "bfloat16": of_model(lambda: Block(128, 2).bfloat16(), square(grad=False).bfloat16()[None]),
    "dropout": of_model(lambda: nn.TransformerEncoderLayer(128, 2, 64), square(grad=False)),
    "checkpoint": of_model(lambda: Checkpointed(*(Block(128, 2) for _ in range(3))), square(grad=False)[None]),
    "convolution": of_model(lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.MaxPool2d(2)), IMAGE),
    "recurrent": of_model(lambda: Last(128), square(grad=False)[None, :12]),
    "noise": of_function(lambda x: F.rrelu(x * 1, training=True).sin()),
    "in place": of_function(lambda x: (x * 1).sin().relu_().mul(2)),
    "function": of_function(lambda x: Doubled.apply(x * 1)),  # type: ignore[no-untyped-call]
    "overlapping": of_function(overlapping),
    "expanded": of_function(expanded),
    "fused": of_function(fused),
    "penalty": of_function(penalised),
    "complex parts": of_function(complex_parts),
    "complex": of_function(lambda x: (x * 1).exp() * (x * 2).conj().sin(), torch.complex64),
    "double": of_function(lambda x: (x * 1).exp().t() @ x.sin(), torch.float64),
    "changed between saves": of_function(changed_between_saves),
    "parts": of_function(parts_with_counters_of_their_own),
}


class Last(nn.Module):
    """The outputs of a recurrent network alone."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.network = nn.GRU(width, width, num_layers=2, dropout=0.5, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.network(x)[0]
        return y


@pytest.mark.parametrize("window_bytes", [0, KIB64, 64 * MIB])
@pytest.mark.parametrize("name", PROGRAMS)
def test_gradients_are_those_without_it(name: str, window_bytes: int) -> None:
    offload = offloading(window_bytes=window_bytes)
    plain, found = PROGRAMS[name](contextlib.nullcontext()), PROGRAMS[name](offload)
    assert all(map(torch.equal, plain, found))
    assert offload.stats.copies_out > 0
    assert offload.stats.bytes_in > 0 or window_bytes
    assert is_empty(offload.stats)


@pytest.mark.parametrize("budget", [0, 255, 256, 100_000, 300_000])
def test_host_memory_stays_within_its_budget(budget: int) -> None:
    offload = offloading(budget)
    plain, found = PROGRAMS["tied"](contextlib.nullcontext()), PROGRAMS["tied"](offload)
    assert all(map(torch.equal, plain, found))
    assert offload.stats.host_bytes_peak <= budget
    assert offload.stats.bytes_stayed > 0
    assert (offload.stats.copies_out > 0) == (budget >= 256)
    block = offload._engine._host._block
    assert block is None or block.nbytes <= budget
    assert is_empty(offload.stats)


def test_places_never_overlap_and_gaps_are_joined() -> None:
    draw = random.Random(0)
    memory = module._HostMemory(offloading()._engine._link, 100 * 256)
    taken: list[Tensor] = []
    refused = 0
    for _ in range(2000):
        if taken and draw.random() < 0.45:
            memory.give_back(taken.pop(draw.randrange(len(taken))))
            continue
        nbytes = draw.randint(1, 5 * 256)
        place = memory.take(nbytes)
        if place is None:
            refused += 1
            continue
        assert place.numel() >= nbytes
        taken.append(place)
        ranges = sorted((p.storage_offset(), p.storage_offset() + p.numel()) for p in taken)
        assert ranges[-1][1] <= 100 * 256
        assert all(end <= begin for (_, end), (begin, _) in itertools.pairwise(ranges))
    assert refused
    for place in taken:
        memory.give_back(place)
    assert memory._gaps == [(0, 100 * 256)]


def test_views_of_a_storage_share_one_copy_and_come_back_as_they_were() -> None:
    offload = offloading()
    h = square()
    with offload:
        views = [h, h.t(), h[5:, ::3], h[:, 1:2].expand(-1, 4), h.unflatten(1, (64, 2))[..., 1]]
        results = [view.sin() for view in views]
    assert offload.stats.copies_out == 1
    assert offload.stats.bytes_out == KIB64
    assert offload.stats.shared == len(views) - 1
    for view, result in zip(views, results, strict=True):
        back = result.grad_fn._saved_self  # type: ignore[union-attr]
        assert back.untyped_storage().data_ptr() != h.untyped_storage().data_ptr()
        assert torch.equal(back, view)
        assert (back.size(), back.stride(), back.dtype) == (view.size(), view.stride(), view.dtype)
        assert back.storage_offset() == view.storage_offset()
    assert offload.stats.bytes_in == KIB64


def test_a_tensor_that_is_saved_again_is_not_copied_again() -> None:
    offload = offloading()
    h = square()
    with offload:
        first = h.sin()
        others = [square(seed).exp() for seed in range(3)]  # its copy is over
        again = h.cos()
    assert offload.stats.copies_out == 1 + len(others)
    del first
    gc.collect()
    assert torch.equal(torch.autograd.grad(again.sum(), h)[0], -h.sin())


def test_parameters_their_views_and_casts_leaves_and_what_is_to_be_kept_never_move() -> None:
    linear, leaf = nn.Linear(128, 128, bias=False), square(grad=False).requires_grad_()
    buffer, frozen = square(1, grad=False), nn.Parameter(square(grad=False), requires_grad=False)
    offload = offloading(keep=[buffer])
    with offload, torch.autocast("cpu", torch.bfloat16):
        results = [
            leaf.sin(),
            leaf[3:].t().sin(),
            linear.weight.t().sin(),
            leaf.bfloat16() @ linear.weight.bfloat16().t(),
            leaf * buffer,
            leaf * buffer[3],
            leaf * frozen.t(),
        ]
    assert len(results) == 7
    # The cast of the leaf, which is no parameter, moves: an operator made it.
    assert offload.stats.copies_out == 1
    assert offload.stats.bytes_out == KIB64 // 2


def test_small_storages_and_those_of_other_kinds_stay() -> None:
    offload = offloading(min_bytes=KIB64)
    small, sparse = square()[:, :64].clone(), square(grad=False).relu().to_sparse()
    with offload:
        results = [small.sin(), small[:1].sin(), torch.sparse.mm(sparse, square(1)), square().sin()]
    assert len(results) == 4
    assert offload.stats.copies_out == 1
    conjugated = (square(grad=False) + 1j).requires_grad_() * 1
    with offload:
        results.append(conjugated.conj().sin())
    assert torch.equal(results[-1].grad_fn._saved_self, conjugated.conj())  # type: ignore[union-attr]


def chain(offload: Any, length: int = 8) -> tuple[Tensor, list[weakref.ref[Any]]]:
    """Saves `length` storages of 64 KiB; returns the loss and weak references to the storages."""
    x = square()
    storages = []
    with offload:
        for _ in range(length):
            storages.append(weakref.ref(x.untyped_storage()))
            x = x.sin()
    return x.sum(), storages


@pytest.mark.parametrize("kept", [0, 1, 3])
def test_sources_are_freed_beyond_the_window(kept: int) -> None:
    offload = offloading(window_bytes=kept * KIB64)
    loss, storages = chain(offload)
    assert [storage() is None for storage in storages] == [True] * (8 - kept) + [False] * kept
    assert offload.stats.device_bytes == kept * KIB64
    assert offload.stats.host_bytes == 8 * KIB64
    loss.backward()
    assert offload.stats.bytes_in == (8 - kept) * KIB64
    assert is_empty(offload.stats)


def test_backward_finds_its_tensors_reloaded_in_reverse_order_within_the_window() -> None:
    offload = offloading(window_bytes=2 * KIB64)
    seen = []

    def note(*_: Any) -> None:
        seen.append((offload.stats.bytes_in // KIB64, offload.stats.device_bytes // KIB64))

    x = square()
    with offload:
        for _ in range(6):
            x = x.sin()
            x.register_hook(note)
    # Each hook runs before the node that reads a tensor: the two last are on the device, two more come with the first.
    x.sum().backward()
    assert [reloads for reloads, _ in seen] == [0, 2, 2, 3, 4, 4]
    assert max(device for _, device in seen) <= 4
    assert is_empty(offload.stats)


def test_blocks_are_reloaded_apart() -> None:
    """A backward of one forward reloads nothing of another, whose backward may be far off."""
    offload = offloading(window_bytes=64 * MIB)
    losses = [chain(offload, 4)[0] for _ in range(2)]
    for saved in list(offload._engine._leaving):
        offload._engine._free_source(saved)
    offload._engine._leaving.clear()
    losses[1].backward()
    assert offload.stats.bytes_in == 4 * KIB64
    losses[0].backward()
    assert offload.stats.bytes_in == 8 * KIB64
    assert is_empty(offload.stats)


def change(tensor: Tensor) -> None:
    with torch.no_grad():
        tensor.add_(1)


def changed_result(around: Any) -> Tensor:
    h = square()
    with around:
        y = h.exp()
    change(y)
    return y


def changed_through_a_view(around: Any) -> Tensor:
    h = square()
    with around:
        y = h.sin()
    change(h[3])
    return y


def changed_before_its_copy(around: Any) -> Tensor:
    h = square()
    with around:
        y = h.sin()
        change(h)
    return y


def changed_after_sharing(around: Any) -> Tensor:
    h = square()
    with around:
        y = h.t().sin()
        change(h)
        return y + h.cos()


def changed_small(around: Any) -> Tensor:
    h = square()[:1].clone()
    with around:
        y = h.sin()
    change(h)
    return y


def changed_parameter(around: Any) -> Tensor:
    weight = nn.Parameter(square(grad=False))
    with around:
        y = square() @ weight
    change(weight)
    return y


def changed_by_backward(around: Any) -> Tensor:
    with around:
        y: Tensor = Spoiled.apply(square() * 1)  # type: ignore[no-untyped-call]
    y.sum().backward(retain_graph=True)
    return y


class Spoiled(torch.autograd.Function):
    """Writes into its saved tensor in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * x.mul_(2)


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    "program",
    [
        changed_result,
        changed_through_a_view,
        changed_before_its_copy,
        changed_after_sharing,
        changed_small,
        changed_parameter,
        changed_by_backward,
    ],
)
@pytest.mark.parametrize("window_bytes", [0, 64 * MIB])
def test_a_change_in_place_is_the_error_that_it_is_without_it(program: Any, window_bytes: int) -> None:
    offload = offloading(min_bytes=KIB64, window_bytes=window_bytes)
    for around in (contextlib.nullcontext(), offload):
        y = program(around)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
    del y
    gc.collect()
    assert is_empty(offload.stats)


@pytest.mark.parametrize("window_bytes", [0, 2 * KIB64, 64 * MIB])
def test_backward_runs_again_with_a_retained_graph(window_bytes: int) -> None:
    offload = offloading(window_bytes=window_bytes)
    leaf = square(grad=False).requires_grad_()
    grads = []
    x = leaf
    with offload:
        for _ in range(6):
            x = (x * 1).sin()
    for retain in (True, True, False):
        leaf.grad = None
        x.sum().backward(retain_graph=retain)
        assert leaf.grad is not None
        grads.append(leaf.grad)
        # Sources, reloads ahead and reloads that were read: a window of each, and the one in use.
        assert offload.stats.device_bytes <= 3 * window_bytes + KIB64
    assert torch.equal(grads[0], grads[1])
    assert torch.equal(grads[0], grads[2])
    del x
    assert is_empty(offload.stats)


def test_an_exception_in_forward_leaves_nothing() -> None:
    offload = offloading(window_bytes=MIB)

    def broken() -> None:
        x = square()
        with offload:
            for _ in range(4):
                x = x.sin()
            raise KeyError

    with pytest.raises(KeyError):
        broken()
    gc.collect()
    assert is_empty(offload.stats)
    x = square()
    y = x.sin()  # its hooks are off
    assert offload.stats.copies_out == 4
    assert y.grad_fn._saved_self.untyped_storage().data_ptr() == x.data_ptr()  # type: ignore[union-attr]
    assert chain(offload)[0].item() == chain(contextlib.nullcontext())[0].item()


def test_an_exception_in_backward_leaves_nothing() -> None:
    offload = offloading(window_bytes=2 * KIB64)
    loss, _ = chain(offload, 4)
    failing = square()
    with offload:
        y = failing.sin()
    failing.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        (loss + y.sum()).backward()
    del loss, y
    square().sum().backward()  # until then autograd keeps what this thread's failed backward had before it
    gc.collect()
    assert is_empty(offload.stats)


def test_a_forward_without_backward_frees_everything() -> None:
    offload = offloading(window_bytes=KIB64)
    loss, storages = chain(offload)
    assert offload.stats.live == 8
    del loss
    assert is_empty(offload.stats)
    assert all(storage() is None for storage in storages)


def test_a_graph_in_a_cycle_with_its_context_is_collected() -> None:
    offload = offloading(window_bytes=KIB64)
    loss, _ = chain(offload)
    stats, engine = offload.stats, weakref.ref(offload._engine)
    offload.graph, loss.context = loss, offload  # type: ignore[attr-defined]
    del offload, loss
    gc.collect()
    assert is_empty(stats)
    assert engine() is None


def test_the_context_may_be_gone_before_backward() -> None:
    offload = offloading()
    loss, _ = chain(offload)
    stats, engine = offload.stats, weakref.ref(offload._engine)
    del offload
    gc.collect()
    loss.backward()
    del loss
    gc.collect()
    assert is_empty(stats)
    assert engine() is None


def test_a_block_around_many_steps_keeps_nothing_of_earlier_ones() -> None:
    offload = offloading(window_bytes=KIB64)
    with offload:
        for _ in range(5):
            chain(contextlib.nullcontext(), 4)
        latest, length = offload._engine.thread.latest[-1], 0
        while latest is not None:
            latest, length = latest.before, length + 1
    assert length <= 4
    assert is_empty(offload.stats)


@pytest.mark.parametrize("inner", [True, False])
def test_hooks_nest(inner: bool) -> None:
    offload, packed = offloading(), []

    def pack(tensor: Tensor) -> Tensor:
        packed.append(tensor.shape)
        return tensor.detach().clone()

    others = saved_tensors_hooks(pack, lambda tensor: tensor)
    leaf = square(grad=False).requires_grad_()
    first, second = (offload, others) if inner else (others, offload)
    with first:
        x = (leaf * 1).sin()
        with second, save_on_cpu():
            x = x.cos()
        with second:
            x = x.exp() * x
        x = x.sin()
    x.sum().backward()
    plain = square(grad=False).requires_grad_()
    y = (plain * 1).sin().cos()
    (y.exp() * y).sin().sum().backward()
    assert leaf.grad is not None
    assert plain.grad is not None
    assert torch.equal(leaf.grad, plain.grad)
    assert packed
    assert offload.stats.copies_out >= 2
    del x
    assert is_empty(offload.stats)


def test_one_context_serves_several_threads() -> None:
    """Forwards, backwards and the deaths of graphs at once, with garbage collections in between."""
    offload = offloading(4 * MIB, window_bytes=2 * KIB64)
    programs = [PROGRAMS[name] for name in ("fused", "expanded", "overlapping", "penalty", "complex parts", "double")]
    plain = [program(contextlib.nullcontext()) for program in programs]  # none draws random numbers
    wrong: list[object] = []

    def work(number: int) -> None:
        try:
            for turn in range(3):
                which = (number + turn) % len(programs)
                found = programs[which](offload)
                if not all(map(torch.equal, plain[which], found)):
                    wrong.append((number, turn, which))
                chain(offload)
                gc.collect(0)
        except BaseException as error:
            wrong.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong
    assert is_empty(offload.stats)
    assert offload._engine._host._gaps == [(0, 4 * MIB)]


def test_a_graph_that_dies_while_the_lock_is_taken_is_ended_afterwards() -> None:
    offload = offloading()
    loss, _ = chain(offload)
    with offload._engine._locked():
        del loss
        assert offload.stats.live == 8
    assert is_empty(offload.stats)


def test_a_save_of_one_thread_does_not_send_what_the_operator_of_another_is_still_writing() -> None:
    offload = offloading()
    saved, go = threading.Event(), threading.Event()

    def other() -> None:
        with offload:
            kept = square(1).sin()
            saved.set()
            go.wait(10)
            del kept

    thread = threading.Thread(target=other)
    thread.start()
    assert saved.wait(10)
    with offload:
        mine = [square().sin(), square().sin(), square().sin()]
        assert offload.stats.copies_out == 2
    assert offload.stats.copies_out == 3
    go.set()
    thread.join()
    del mine
    assert is_empty(offload.stats)


def test_the_script_says_that_all_bits_are_equal() -> None:
    said = run(sys.executable, SCRIPT, "--layers", 1, "--width", 64, "--tokens", 64, "--steps", 2)
    lines = said.splitlines()
    assert [line.split() for line in lines[:3]] == [
        ["nullcontext", "bit-equal"],
        ["save_on_cpu", "bit-equal"],
        ["save_on_cpu_overlapped", "bit-equal"],
    ]
    assert lines[3].startswith("Stats(copies_out=")
    assert len(lines) == 4


def test_it_is_one_short_file_over_torch_and_the_standard_library() -> None:
    text = SCRIPT.read_text()
    assert len(text.splitlines()) <= 500
    imported = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            imported |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(str(node.module).partition(".")[0])
    assert imported - sys.stdlib_module_names == {"torch"}
