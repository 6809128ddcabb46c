"""Work of one operator call: floating-point operations and bytes of memory traffic by its shapes, and the time they take.

A first estimate of what a replay costs, for before one was timed: the longer of the time that arithmetic takes at its
rate and that memory takes at its own, plus what it takes to call an operator at all. Reads shapes, strides, element
sizes and schemas, never a number in a tensor, so that tensors without bytes (fake, meta) give the same answers and no
device is waited for.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from memo.swap.recompute.tape.attention import is_attention
from memo.torch_private import tree_leaves

_ATEN = torch.ops.aten
_PS_PER_S = 10**12


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one call of an operator does."""

    flops: int
    """Floating-point operations; of an operator that is no product, the elements that it writes."""
    nbytes: int
    """Bytes read and written. An expanded tensor counts what it has in memory."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What a device reaches, in large operators."""

    flops_per_s: int
    bytes_per_s: int
    launch_ps: int
    """Picoseconds that every call takes besides, in Python, dispatcher and launch."""

    def __post_init__(self) -> None:
        if min(self.flops_per_s, self.bytes_per_s) <= 0 or self.launch_ps < 0:
            raise ValueError(f"rates of a device are positive: {self}")


# An H100 (SXM5): 0.6 of the 989 TFLOP/s in dense bfloat16 and of the 67 in float32 that its data sheet has, 0.9 of its
# 3.35 TB/s. (`memo.mip.inputs` has the same 0.6, with its source.) 5 µs for an eager call are an estimate, not measured.
_CUDA_16_BITS = Rates(flops_per_s=593 * 10**12, bytes_per_s=3 * 10**12, launch_ps=5_000_000)
_CUDA = dataclasses.replace(_CUDA_16_BITS, flops_per_s=40 * 10**12)
# One core of an EPYC with bfloat16 tiles, torch 2.13: 1024 x 1024 products, sums of 16 million elements, `mul` of 8.
_CPU_16_BITS = Rates(flops_per_s=200 * 10**9, bytes_per_s=16 * 10**9, launch_ps=2_000_000)
_CPU = dataclasses.replace(_CPU_16_BITS, flops_per_s=55 * 10**9)


def rates_of(device_type: str, dtype: torch.dtype) -> Rates:
    """Returns the default rates for products in this type; a device that is not a CPU is taken for an H100."""
    if dtype.itemsize <= 2:
        return _CPU_16_BITS if device_type == "cpu" else _CUDA_16_BITS
    return _CPU if device_type == "cpu" else _CUDA


def picoseconds_of(work: Work, rates: Rates) -> int:
    """Returns the estimated time of a call in picoseconds, rounded up; at least 1, so that no replay is free."""
    arithmetic = -(-work.flops * _PS_PER_S // rates.flops_per_s)
    memory = -(-work.nbytes * _PS_PER_S // rates.bytes_per_s)
    return max(1, max(arithmetic, memory) + rates.launch_ps)


def _packets(*names: str) -> frozenset[Any]:
    """The operators of these names that this version of torch has."""
    return frozenset(getattr(_ATEN, name) for name in names if hasattr(_ATEN, name))


# Where the two factors of a product stand among its arguments.
_FACTORS = {
    **dict.fromkeys(_packets("mm", "bmm", "mv", "linear", "_scaled_mm", "_grouped_mm", "_scaled_grouped_mm"), (0, 1)),
    **dict.fromkeys(_packets("addmm", "baddbmm", "addbmm", "addmv", "_addmm_activation"), (1, 2)),
}
_CONVOLUTIONS = _packets("convolution", "_convolution", "cudnn_convolution", "mkldnn_convolution")
_ATTENTION = _packets(
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)
# Their queries are tokens, heads, width: with a batch dimension, or several sequences in a row.
_ATTENTION_TOKENS_FIRST = _packets("_flash_attention_forward", "_efficient_attention_forward")
_LONGEST = ("max_seqlen_k", "max_seqlen_kv", "max_k")
# How many keys before its own a query attends to, at most; -1 and None: all of them. `window` has its own in it.
_WINDOWS = ("window_size_left", "window")
# These move no byte; views besides, which their schema shows.
_MOVES_NOTHING = _packets(
    "_unsafe_view", "empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"
)
# What these write into is not read.
_OVERWRITE = _packets(
    "bernoulli_", "cauchy_", "copy_", "exponential_", "fill_", "geometric_", "log_normal_", "normal_", "random_",
    "uniform_", "zero_",
)  # fmt: skip
# Of their first argument they read only as much as they give.
_LOOK_UP = _packets("_unsafe_index", "embedding", "gather", "index", "index_select", "take")
# Of their first argument they read and write only as many elements as another one has.
_WRITE_AT = _packets(
    "_index_put_impl_", "index_add_", "index_copy_", "index_put_", "index_reduce_", "put_", "scatter_",
    "scatter_add_", "scatter_reduce_",
)  # fmt: skip


def work_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Work:
    """Counts the work of one call as a dispatch mode sees it.

    Args:
        func: the operator: an overload, or a higher-order operator.
        args: its positional arguments.
        kwargs: its other arguments.
        out: what it returned.

    Returns:
        The call's work; none for views and allocations.
    """
    packet, schema = getattr(func, "overloadpacket", func), getattr(func, "_schema", None)
    if schema is None:
        read, written = _tensors((args, kwargs)), _tensors(out)
    elif packet in _MOVES_NOTHING or any(_is_view(returned) for returned in schema.returns):
        return Work(flops=0, nbytes=0)
    else:
        read, written = _traffic(func, args, kwargs, out)
    nbytes = sum(map(_nbytes, read)) + sum(map(_nbytes, written))
    if packet in _WRITE_AT:
        whole, touched = args[0], max((t.numel() for t in _tensors(args[1:])), default=0)
        nbytes -= 2 * max(0, _nbytes(whole) - touched * whole.element_size())
        return Work(flops=touched, nbytes=nbytes)
    if packet in _LOOK_UP:
        nbytes -= max(0, _nbytes(args[0]) - sum(map(_nbytes, written)))
    if packet not in _ATTENTION and packet not in _ATTENTION_TOKENS_FIRST and is_attention(func):
        return Work(flops=_named_attention_flops(args, kwargs, schema, written), nbytes=nbytes)
    return Work(flops=_flops(packet, args, kwargs, out, written), nbytes=nbytes)


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _nbytes(tensor: torch.Tensor) -> int:
    """Bytes that it has in memory: an expanded dimension has one element."""
    if tensor.layout is not torch.strided:
        return int(tensor.numel()) * tensor.element_size()
    elements = math.prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or not size)
    return int(elements) * tensor.element_size()


def _is_view(returned: Any) -> bool:
    return returned.alias_info is not None and not returned.alias_info.is_write


def _traffic(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The tensors that a call reads and those that it writes; what it changes in place is in both."""
    overwrites = func.overloadpacket in _OVERWRITE
    read: list[torch.Tensor] = []
    written: list[torch.Tensor] = []
    for position, argument in enumerate(func._schema.arguments):
        given = args[position] if position < len(args) else kwargs.get(argument.name)
        tensors = _tensors(given)
        if argument.alias_info is not None and argument.alias_info.is_write:
            written += tensors
            if overwrites or argument.is_out:
                continue
        read += tensors
    returns = func._schema.returns
    for returned, given in zip(returns, (out,) if len(returns) == 1 else out or (), strict=True):
        if returned.alias_info is None:
            written += _tensors(given)
    return read, written


def _flops(
    packet: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any, written: Sequence[torch.Tensor]
) -> int:
    if packet in _ATTENTION:
        return _attention_flops(*args[:3], keys=int(args[1].shape[-2]), causal=_is_causal(packet, args, kwargs))
    if packet in _ATTENTION_TOKENS_FIRST:
        # Lengths of packed sequences are numbers in a tensor: each is taken to be as long as the longest.
        longest = args[6] if packet is _ATEN._flash_attention_forward else args[7]
        keys = int(args[1].shape[1] if longest is None else longest)
        window = _window(kwargs, keys)
        if window is not None:
            return _local_flops(*args[:3], keys=keys, window=window)
        return _attention_flops(*args[:3], keys=keys, causal=_is_causal(packet, args, kwargs))
    if packet in _FACTORS:
        left, right = (args[at] for at in _FACTORS[packet])
        return _product_flops(left, right, columns_first=packet is _ATEN.linear)
    from torch.utils.flop_counter import (  # imports triton: a third of `memo.offload`'s import
        conv_flop_count,
        flop_registry,
    )

    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=out))
    if packet in _CONVOLUTIONS:  # the CPU's, which is never transposed and for which torch has no formula
        return int(conv_flop_count(list(args[0].shape), list(args[1].shape), list(out.shape)))
    return sum(int(tensor.numel()) for tensor in written)


def _product_flops(left: torch.Tensor, right: torch.Tensor, *, columns_first: bool) -> int:
    """Two for each element of the left factor and each column of the right one."""
    columns = 1 if right.dim() == 1 else right.shape[0] if columns_first else right.shape[-1]
    # Each group of a left factor in groups meets only its own columns of a right factor that is one matrix.
    groups = left.shape[0] if left.dim() == 3 and right.dim() == 2 and not columns_first else 1
    return 2 * int(left.numel()) * int(columns) // max(1, int(groups))


def _attention_flops(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, keys: int, causal: bool) -> int:
    """Scores and their product with the values; half of it where half of the square is never looked at."""
    width = int(key.shape[-1])
    rows = int(query.numel()) // max(1, width)
    return 2 * rows * keys * (width + int(value.shape[-1])) // (2 if causal else 1)


def _local_flops(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *, keys: int, window: int) -> int:
    """FLOPs of causal attention in which each query has `window` keys, the first ones fewer."""
    seen = 2 * window * keys - window * window  # twice the keys of all queries of a sequence
    return _attention_flops(query, key, value, keys=seen, causal=True) // keys


def _window(given: Mapping[str, Any], keys: int) -> int | None:
    """Keys that a query attends to, where these are fewer than all."""
    for name in _WINDOWS:
        before = given.get(name)
        if isinstance(before, int) and before >= 0:
            window = before + (name != "window")
            return window if window < keys else None
    return None


def _named_attention_flops(
    args: Sequence[Any], kwargs: Mapping[str, Any], schema: Any, written: Sequence[torch.Tensor]
) -> int:
    """FLOPs of attention that is known by its name: queries, keys and values come first, causal as most of it is.

    FlexAttention has heads before tokens; other packages have tokens first, of a batch or of several sequences in a row,
    whose longest is then told.
    """
    given = {declared.name: value for declared, value in zip(schema.arguments, args, strict=False)} if schema else {}
    first = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)][:3]
    if len(first) < 3 or any(tensor.dim() not in (3, 4) for tensor in first):
        return sum(int(tensor.numel()) for tensor in written)
    longest = next((value for name, value in {**given, **kwargs}.items() if name in _LONGEST and value), None)
    keys = first[1].shape[-2] if schema is None else longest or first[1].shape[-3]
    query, key, value = first
    window = _window({**given, **kwargs}, int(keys))
    if window is not None:
        return _local_flops(query, key, value, keys=int(keys), window=window)
    return _attention_flops(query, key, value, keys=int(keys), causal=True)


def _is_causal(packet: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    arguments = packet.default._schema.arguments
    for position, argument in enumerate(arguments):
        if argument.name in ("is_causal", "custom_mask_type"):
            return bool(args[position] if position < len(args) else kwargs.get(argument.name))
    return False
