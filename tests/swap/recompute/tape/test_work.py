"""Work of operators by hand, on tensors that have no bytes; times and bans that follow from it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from memo.swap import Rates, Work, picoseconds_of, work_of
from memo.swap.recompute.tape.work import rates_of

ATEN = torch.ops.aten


class Calls(TorchDispatchMode):
    """Notes each operator with its work."""

    def __init__(self) -> None:
        super().__init__()
        self.works: dict[str, Work] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.removeprefix("aten::")
        self.works[name] = work_of(func, args, kwargs or {}, out)
        return out


def t(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def works(call: Callable[[], object]) -> dict[str, Work]:
    with Calls() as calls:
        call()
    return calls.works


def at(*shape: int) -> torch.Tensor:
    return t(*shape, dtype=torch.int64)


# Bytes are those of float32 (4) and of int64 indices (8).
BY_HAND: dict[str, tuple[Callable[[], object], int, int]] = {
    "mm": (lambda: ATEN.mm(t(5, 3), t(3, 7)), 2 * 5 * 3 * 7, 4 * (15 + 21 + 35)),
    "addmm": (lambda: ATEN.addmm(t(7), t(5, 3), t(3, 7)), 210, 4 * (7 + 15 + 21 + 35)),
    "bmm": (lambda: ATEN.bmm(t(2, 5, 3), t(2, 3, 7)), 420, 4 * 2 * (15 + 21 + 35)),
    "addbmm": (lambda: ATEN.addbmm(t(5, 7), t(2, 5, 3), t(2, 3, 7)), 420, 4 * (35 + 30 + 42 + 35)),
    "mv": (lambda: ATEN.mv(t(5, 3), t(3)), 30, 4 * (15 + 3 + 5)),
    "convolution": (lambda: F.conv1d(t(2, 3, 9), t(5, 3, 4)), 2 * 2 * 5 * 3 * 4 * 6, 4 * (54 + 60 + 60)),
    "mul": (lambda: t(5, 3) * t(3), 15, 4 * (15 + 3 + 15)),
    "sum": (lambda: t(5, 3).sum(-1), 5, 4 * (15 + 5)),
    "add_": (lambda: t(5, 3).add_(t(3)), 15, 4 * (15 + 3 + 15)),
    "copy_": (lambda: t(5, 3).copy_(t(3)), 15, 4 * (3 + 15)),
    "fill_": (lambda: t(5, 3).fill_(1.0), 15, 4 * 15),
    "cat": (lambda: torch.cat([t(5, 3), t(2, 3)]), 21, 4 * (21 + 21)),
    "native_layer_norm": (lambda: F.layer_norm(t(5, 3), (3,), t(3), t(3)), 25, 4 * (15 + 3 + 3 + 15 + 5 + 5)),
    "_to_copy": (lambda: t(5, 3).to(torch.bfloat16), 15, 4 * 15 + 2 * 15),
    "embedding": (lambda: F.embedding(at(6), t(1000, 3)), 18, 8 * 6 + 4 * (18 + 18)),
    "index": (lambda: t(1000, 3)[at(6)], 18, 8 * 6 + 4 * (18 + 18)),
    "index_add_": (lambda: t(1000, 3).index_add_(0, at(6), t(6, 3)), 18, 8 * 6 + 4 * (18 + 18 + 18)),
    "zeros": (lambda: torch.zeros(5, 3, device="meta"), 15, 4 * 15),
    "empty_like": (lambda: torch.empty_like(t(5, 3)), 0, 0),
    "view": (lambda: t(5, 3).view(15), 0, 0),
    "_unsafe_view": (lambda: ATEN._unsafe_view(t(5, 3), (15,)), 0, 0),
    "split": (lambda: t(6, 3).split(2), 0, 0),
    "detach": (lambda: t(5, 3).detach(), 0, 0),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_work_is_what_one_counts_by_hand(name: str) -> None:
    call, flops, nbytes = BY_HAND[name]
    assert works(call)[name] == Work(flops=flops, nbytes=nbytes)


def test_a_result_that_is_given_is_written_and_not_read() -> None:
    given = ATEN.mm.out(t(5, 3), t(3, 7), out=t(5, 7))
    fresh = ATEN.mm(t(5, 3), t(3, 7))
    args = (t(5, 3), t(3, 7))
    assert work_of(ATEN.mm.out, args, {"out": given}, given) == work_of(ATEN.mm.default, args, {}, fresh)


def test_an_expanded_tensor_counts_what_it_has_in_memory() -> None:
    found = works(lambda: t(5, 1).expand(5, 1000) + 1)
    assert found["add"] == Work(flops=5000, nbytes=4 * (5 + 5000))


def test_linear_has_its_columns_first() -> None:
    found = work_of(ATEN.linear.default, (t(2, 5, 3), t(7, 3)), {}, t(2, 5, 7))
    assert found == Work(flops=2 * 10 * 3 * 7, nbytes=4 * (30 + 21 + 70))


def test_the_convolution_of_the_cpu_counts_as_any_other() -> None:
    args = (t(2, 4, 9, 9), t(6, 2, 3, 3), None, [0, 0], [2, 2], [1, 1], 2)
    assert work_of(ATEN.mkldnn_convolution.default, args, {}, t(2, 6, 4, 4)).flops == 2 * (2 * 6 * 4 * 4) * (2 * 3 * 3)


def test_grouped_products_count_each_row_once() -> None:
    tokens, experts = t(6, 4), t(3, 4, 8)
    grouped = ATEN._grouped_mm
    assert work_of(grouped.default, (tokens, experts), {}, t(6, 8)).flops == 2 * 6 * 4 * 8
    assert work_of(grouped.default, (t(3, 2, 4), experts), {}, t(3, 2, 8)).flops == 2 * 6 * 4 * 8
    assert work_of(grouped.default, (t(4, 6), t(6, 8)), {}, t(3, 4, 8)).flops == 2 * 6 * 4 * 8
    assert work_of(grouped.default, (experts, t(8, 6)), {}, t(4, 6)).flops == 2 * 6 * 4 * 8


@pytest.mark.parametrize("causal", [False, True])
def test_attention_counts_scores_and_values_and_half_of_them_if_causal(causal: bool) -> None:
    query, key, value = t(2, 4, 10, 8), t(2, 2, 30, 8), t(2, 2, 30, 6)
    dense = 2 * 2 * 4 * 10 * 30 * (8 + 6) // (2 if causal else 1)
    flash = ATEN._scaled_dot_product_flash_attention_for_cpu
    assert work_of(flash.default, (query, key, value, 0.0, causal), {}, (query, t(2, 4, 10))).flops == dense
    packed = (t(20, 4, 8), t(60, 2, 8), t(60, 2, 6), at(3), at(3), 10, 30, 0.0, causal, False)
    whole = ATEN._flash_attention_forward
    outs = (t(20, 4, 8), t(4, 20), at(2), at(2), t(0))
    assert work_of(whole.default, packed, {}, outs).flops == dense
    batch = (t(2, 10, 4, 8), t(2, 30, 2, 8), t(2, 30, 2, 6), None, None, None, None, None, 0.0, int(causal))
    assert work_of(ATEN._efficient_attention_forward.default, batch, {}, (*outs[:4], 10, 30)).flops == dense


@pytest.mark.parametrize("window", [1, 7, 30, 31])
def test_attention_to_a_window_counts_what_is_in_it(window: int) -> None:
    tensors = (t(2, 30, 4, 8), t(2, 30, 2, 8), t(2, 30, 2, 8))
    ahead = torch.arange(30)[:, None] - torch.arange(30)
    pairs = int(((ahead >= 0) & (ahead < window)).sum()) - min(window, 30) / 2  # a corner is a triangle
    flops = 2 * 2 * 4 * pairs * (8 + 8)
    flash, outs = ATEN._flash_attention_forward, (tensors[0], t(2, 4, 30), at(2), at(2), t(0))
    dense = (*tensors, None, None, 30, 30, 0.0, False, False)
    sides = {"window_size_left": window - 1, "window_size_right": 0}
    if window < 30:  # else it is full, and not said to be causal
        assert work_of(flash.default, dense, sides, outs).flops == flops
    whole = {"window_size_left": -1, "window_size_right": -1}
    assert work_of(flash.default, dense, whole, outs).flops == 2 * 2 * 2 * 4 * 30 * 30 * 8
    from memo.gpt.model import local_attention

    assert local_attention.local_attention is not None  # registers the operator
    own = torch.ops.memo.local_attention
    assert work_of(own.default, (*tensors, window), {}, (tensors[0], t(2, 30, 4))).flops == flops


def test_lengths_of_packed_sequences_are_not_read() -> None:
    """On a device that would wait for it."""

    class Unreadable(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func in (torch.Tensor.diff, torch.Tensor.tolist, torch.Tensor.item):
                raise AssertionError(func)
            return super().__torch_function__(func, types, args, kwargs or {})

    offsets = torch.tensor([0, 5, 20]).as_subclass(Unreadable)
    args = (t(20, 4, 8), t(20, 4, 8), t(20, 4, 8), offsets, offsets, 15, 15, 0.0, False, False)
    out = (t(20, 4, 8), t(4, 20), at(2), at(2), t(0))
    assert work_of(ATEN._flash_attention_forward.default, args, {}, out).flops == 2 * 20 * 4 * 15 * 16


def layer(device: str) -> Callable[[], object]:
    encoder = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True, device=device)
    hidden = torch.empty(2, 10, 32, device=device, requires_grad=True)
    return lambda: encoder(hidden)


def test_meta_fake_and_real_tensors_give_the_same_work() -> None:
    with FakeTensorMode():
        fake = works(layer("cpu"))
    fake.pop("prim::device", None)  # a question that fake tensors alone are asked
    assert fake == works(layer("cpu"))
    products = ("addmm", "native_layer_norm", "relu")
    assert {name: works(layer("meta"))[name] for name in products} == {name: fake[name] for name in products}


def test_products_count_as_torch_counts_them() -> None:
    left, right, image, kernel = t(3, 5, 8), t(3, 8, 6), t(2, 4, 9, 9), t(6, 2, 3, 3)

    def run() -> None:
        torch.bmm(left, right)
        torch.baddbmm(t(3, 5, 6), left, right)
        F.conv2d(image, kernel, groups=2, stride=2)
        F.conv_transpose2d(image, t(4, 3, 3, 3), groups=2)

    class Sum(Calls):
        total = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            self.total += work_of(func, args, kwargs or {}, out).flops
            return out

    with FlopCounterMode(display=False) as counter:
        run()
    with Sum() as summed:
        run()
    assert summed.total == counter.get_total_flops()


def test_an_operator_with_a_formula_of_its_own_counts_by_it() -> None:
    args = (t(2, 4, 9), t(2, 4, 9), t(4, 4, 1), None, [1], [0], [1], False, [0], 1, [True, True, False])
    out = (t(2, 4, 9), t(4, 4, 1), None)
    with FlopCounterMode(display=False) as counter:
        ATEN.convolution_backward(*args)
    assert work_of(ATEN.convolution_backward.default, args, {}, out).flops == counter.get_total_flops() > 0


def test_a_higher_order_operator_reads_what_it_is_given_and_writes_what_it_gives() -> None:
    args = (True, torch.sin, torch.cos, (t(5, 3), t(3)))
    assert work_of(torch.ops.higher_order.cond, args, {}, (t(5, 3),)) == Work(flops=15, nbytes=4 * (15 + 3 + 15))


def test_time_is_the_longer_of_arithmetic_and_memory_and_a_launch() -> None:
    rates = Rates(flops_per_s=10**12, bytes_per_s=10**11, launch_ps=7)
    assert picoseconds_of(Work(flops=100, nbytes=5), rates) == 100 + 7
    assert picoseconds_of(Work(flops=10, nbytes=5), rates) == 50 + 7
    assert picoseconds_of(Work(flops=0, nbytes=0), rates) == 7


def test_time_is_rounded_up_and_never_nothing() -> None:
    rates = Rates(flops_per_s=3 * 10**12, bytes_per_s=10**15, launch_ps=0)
    assert picoseconds_of(Work(flops=4, nbytes=0), rates) == 2
    assert picoseconds_of(Work(flops=0, nbytes=0), rates) == 1


@pytest.mark.parametrize("wrong", [{"flops_per_s": 0}, {"bytes_per_s": -1}, {"launch_ps": -1}])
def test_rates_that_no_device_has_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="positive"):
        Rates(**{"flops_per_s": 1, "bytes_per_s": 1, "launch_ps": 0} | wrong)


def test_a_gpu_is_faster_and_short_types_are_faster() -> None:
    for device in ("cpu", "cuda"):
        short, single = rates_of(device, torch.bfloat16), rates_of(device, torch.float32)
        assert short.flops_per_s > single.flops_per_s
        assert short.bytes_per_s == single.bytes_per_s
    assert rates_of("cuda", torch.float32).flops_per_s > rates_of("cpu", torch.bfloat16).flops_per_s
