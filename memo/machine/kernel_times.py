"""Seconds of one operator's kernel on a GPU that need not be there, by its shapes.

A matrix product takes its FLOPs at the GPU's rate for its dtype, attention at its kernel's rate for the head size and the
direction, anything else its bytes; whichever of FLOPs and bytes takes longer. Work is counted by `memo.swap.work_of`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from memo.mip.inputs import Hardware
from memo.swap import Rates, is_attention, work_of

FP32_SHARE = 67 / 989
"""Peak of float32 products without tensor cores, as a share of that in bfloat16: the data sheet of an H100."""
_ATEN = torch.ops.aten
_FORWARD = _ATEN._scaled_dot_product_flash_attention_for_cpu.default
_PRODUCTS = frozenset(
    getattr(_ATEN, name)
    for name in ("mm", "bmm", "addmm", "baddbmm", "linear", "_grouped_mm", "convolution", "convolution_backward")
    if hasattr(_ATEN, name)
)


class KernelTime(NamedTuple):
    """Time and work of one kernel; `seconds` is 0 for an operator that launches none."""

    seconds: float
    product_flops: int = 0
    """FLOPs of a matrix product."""
    attention_flops: int = 0
    """FLOPs of fused attention's forward, causal where it is; those of backward follow from it."""
    attends: bool = False
    """Attention, forward or backward."""


class KernelTimes:
    """Times of a GPU's kernels."""

    def __init__(self, hardware: Hardware) -> None:
        self._hardware = hardware
        self._bytes_per_s = hardware.elementwise_bytes_per_s

    def of(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> KernelTime:
        """Time of one call, as a dispatch mode sees it.

        Args:
            func: the operator.
            args: its positional arguments.
            kwargs: its other arguments.
            out: what it returned.
        """
        name = func.overloadpacket.__name__ if hasattr(func, "overloadpacket") else str(func)
        if "attention" in name and "backward" in name:
            work = work_of(_FORWARD, args[1:4], {"is_causal": _is_causal(func, args)}, args[4:6])
            return KernelTime(self._attention_s(work.flops, args[1:4], backward=True), attends=True)
        if name == "all_gather_copy_in":  # FSDP2's: of what it is given to write into, it writes this rank's part
            return KernelTime(2 * sum(tensor.nbytes for tensor in args[0]) / self._bytes_per_s)
        work = work_of(func, args, kwargs, out)
        if not work.flops and not work.nbytes:
            return KernelTime(0.0)
        if is_attention(func):
            tensors = [one for one in (*args, *kwargs.values()) if isinstance(one, torch.Tensor)]
            return KernelTime(self._attention_s(work.flops, tensors), attention_flops=work.flops, attends=True)
        moved_s = work.nbytes / self._bytes_per_s
        if getattr(func, "overloadpacket", None) not in _PRODUCTS:
            return KernelTime(moved_s)
        dtype = next((one.dtype for one in (*args, out) if isinstance(one, torch.Tensor)), torch.float32)
        rate = self._hardware.product_flops_per_s * (1.0 if dtype.itemsize <= 2 else FP32_SHARE)
        return KernelTime(max(work.flops / rate, moved_s), product_flops=work.flops)

    def _attention_s(self, flops: int, tensors: Sequence[torch.Tensor], *, backward: bool = False) -> float:
        """Seconds of attention whose first tensors are queries and keys, with heads before tokens or behind them."""
        key = tensors[1]
        flops = flops if key.itemsize <= 2 else round(flops / FP32_SHARE)
        return self._hardware.attention_s(flops, head=key.shape[-1], keys=max(key.shape[-3:-1]), backward=backward)


def _is_causal(func: Any, args: Sequence[Any]) -> bool:
    """Argument `is_causal` of attention's backward."""
    names = [argument.name for argument in func._schema.arguments]
    at = names.index("is_causal") if "is_causal" in names else len(args)
    return bool(args[at]) if at < len(args) else True


def replay_rates(hardware: Hardware) -> Rates:
    """Rates at which the engine of `memo.offload` prices replays on a GPU that is not there."""
    return Rates(
        flops_per_s=int(hardware.product_flops_per_s),
        bytes_per_s=int(hardware.elementwise_bytes_per_s),
        launch_ps=5_000_000,  # as on a GPU that is there (memo.swap.recompute.tape.work)
    )
