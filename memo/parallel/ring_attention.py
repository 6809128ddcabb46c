"""Ring attention (Liu et al. 2023) over a divided sequence, for any number of heads.

Keys and values circulate between ranks while queries stay; they are sent while the kernel runs, one rank's at a time,
so no rank ever has them all. Owns the autograd function around torch's loops and the choice of kernel. torch offers
ring attention for DTensors on CUDA only; its loops take any kernel that returns log-sum-exp, the CPU's too.

Under a causal mask late tokens are most of the work; so every rank holds an early and a late part of the sequence
(SequenceShards.early_and_late), which is the same work on each.

    rank 0 of 2   tokens [0, 2) and [6, 8)      rank 1   tokens [2, 4) and [4, 6)

Saved are q, k, v, the result and its log-sum-exp: as many units of b·s·h as on one rank. Partial results are merged in
float32, whatever the inputs are.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from memo.errors import UsageError
from memo.swap import memoize
from memo.torch_private import attention as torchs

_TOKENS = 2  # of (batch, heads, tokens, head size), as torch's kernels take it

_aten = torch.ops.aten


class Ring:
    """Causal ring attention, called as `ring(query, key, value)`.

    Args:
        group: ranks that share the sequence. Each has (batch, tokens / ranks, heads, head size) tensors of an early and a
            late part of the tokens; keys and values may have fewer heads. The result has the shape of `query`.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def __call__(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Attends to the tokens of all ranks."""
        return _attend(query, key, value, self._group)


@memoize
def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    groups = query.shape[2] // key.shape[2]
    if groups > 1:
        key, value = key.repeat_interleave(groups, dim=2), value.repeat_interleave(groups, dim=2)
    q, k, v = (tensor.transpose(1, 2) for tensor in (query, key, value))
    out = _RingAttention.apply(q, k, v, group)  # type: ignore[no-untyped-call]
    return cast("torch.Tensor", out.transpose(1, 2))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Kernel:
    """One of torch's fused kernels: forward returns (result, log-sum-exp, *rest), of which backward takes `rest` by name."""

    forward: Any
    backward: Any
    rest: Sequence[str] = ()


_CPU = _Kernel(
    forward=_aten._scaled_dot_product_flash_attention_for_cpu,
    backward=_aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
)
_CUDA = _Kernel(
    forward=_aten._scaled_dot_product_flash_attention,
    backward=_aten._scaled_dot_product_flash_attention_backward.default,
    rest=("cum_seq_q", "cum_seq_k", "max_q", "max_k", "philox_seed", "philox_offset"),
)


def _kernel(query: torch.Tensor) -> _Kernel:
    if query.device.type != "cuda":
        return _CPU
    if query.dtype not in (torch.float16, torch.bfloat16) or query.shape[-1] % 8:
        raise UsageError(
            f"ring attention on a GPU needs half precision and heads of a multiple of 8, not {query.dtype} and heads of "
            f"{query.shape[-1]}; use --precision bf16-autocast, or --cp-attention ulysses"
        )
    return _CUDA


class _RingAttention(torch.autograd.Function):
    """(batch, heads, tokens, head size) each."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: dist.ProcessGroup
    ) -> torch.Tensor:
        kernel = _kernel(query)
        with _ring_options():
            out, log_sums, *rest = torchs._templated_ring_attention(
                group, _TOKENS, kernel.forward, query, key, value, is_causal=True, dropout_p=0.0
            )
        # Laid out as the projection after it reads it, (batch, tokens, heads, head size), so that both save one storage.
        out = out.transpose(1, 2).contiguous().transpose(1, 2)
        ctx.save_for_backward(query, key, value, out, log_sums)
        ctx.group, ctx.kernel = group, kernel
        ctx.rest = dict(zip(kernel.rest, rest, strict=False))  # numbers, and seeds of a dropout that there is not
        return cast("torch.Tensor", out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, out, log_sums = ctx.saved_tensors
        with _ring_options():
            grads = torchs._templated_ring_attention_backward(
                ctx.group,
                _TOKENS,
                ctx.kernel.backward,
                grad_out=grad,
                grad_out_name="grad_out",
                query=query,
                key=key,
                value=value,
                out=out,
                logsumexp=log_sums,
                is_causal=True,
                dropout_p=0.0,
                **ctx.rest,
            )
        return (*grads[:3], None)


@contextlib.contextmanager
def _ring_options() -> Iterator[None]:
    """Sets torch's context-parallel options for the block: early and late parts, and keys never all gathered."""
    options = torchs._cp_options
    before = dataclasses.replace(options)
    options.enable_load_balance, options.convert_to_f32 = True, True
    options.rotate_method = torchs._RotateMethod.ALL_TO_ALL
    try:
        yield
    finally:
        for field in dataclasses.fields(before):
            setattr(options, field.name, getattr(before, field.name))
