"""Floating-point operations of a step, counted as it runs: of each layer's forward, and of recompute."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.flop_counter import FlopCounterMode, flop_registry, sdpa_flop

from memo.manager import offload
from memo.record import Step
from memo.swap import Layer


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Flops:
    """Floating-point operations of one forward, of a layer or of the model."""

    whole: float
    """All of them, with causal attention."""
    attention: float
    """The part of `whole` that attention's scores do, counted as causal: half of the full square."""


def forward_flops(step: Step, layers: Sequence[Layer]) -> tuple[list[Flops], Flops]:
    """Counts the operations of each layer's forward, and of the model's."""
    aten, own = torch.ops.aten, torch.ops.memo
    # torch has no formula for the CPU's fused attention, none that heeds a window, and in 2.11 none for fewer heads of keys.
    formulas: dict[Any, Any] = {getattr(aten, f"_scaled_dot_product_{kernel}"): _attention_flop for kernel in _KERNELS}
    formulas[aten._flash_attention_forward] = _flash_flop
    if hasattr(own, "local_attention"):  # registered with the GPT
        formulas[own.local_attention] = _local_flop
    counter = FlopCounterMode(display=False, custom_mapping=formulas)
    with counter:
        step.loss()
    counts = counter.get_flop_counts()
    prefix = type(step.model).__name__
    return [_of(counts.get(f"{prefix}.{layer.name}", {})) for layer in layers], _of(counts.get("Global", {}))


_KERNELS = ("flash_attention", "flash_attention_for_cpu", "efficient_attention", "cudnn_attention")


def _attention_flop(query: Any, key: Any, value: Any, *_: object, **__: object) -> int:
    heads = query[:2]
    return int(sdpa_flop(query, (*heads, *key[2:]), (*heads, *value[2:])))


def _flash_flop(query: torch.Tensor, key: torch.Tensor, *others: Any, out_val: object = None, **sides: Any) -> int:
    if query.dim() != 4:  # sequences in a row
        return int(
            flop_registry[torch.ops.aten._flash_attention_forward](query, key, *others, out_val=out_val, **sides)
        )
    before = sides.get("window_size_left")
    window = key.shape[1] if before is None or before < 0 else before + 1
    return _local_flop(query.shape, key.shape, None, window)  # torch's formula takes tokens for heads


_flash_flop._get_raw = True  # type: ignore[attr-defined]  # torch then gives tensors, not their shapes


def _local_flop(query: Any, key: Any, _: object, window: int, **__: object) -> int:
    """FLOPs of local attention, twice, since half of it is taken; (batch, tokens, heads, head size) each."""
    batch, queries, heads, width = query
    seen = min(window, key[1])  # by all but the first tokens
    return int(4 * batch * queries * heads * width * (2 * seen - seen * seen / key[1]))


def _of(counts: dict[Any, int]) -> Flops:
    attention = sum(count for operator, count in counts.items() if "attention" in str(operator)) / 2
    return Flops(whole=sum(counts.values()) - attention, attention=attention)


def repeated_flops(step: Step, *, disk: str | Path | None) -> float:
    """Counts what backward recomputes at level SAVE_ATTENTION, over all layers."""

    def backward_flops(loss: torch.Tensor) -> float:
        with FlopCounterMode(display=False) as counter:
            loss.backward()
        return float(counter.get_total_flops())

    plain = backward_flops(step.loss())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        manager = offload(step.model, alpha=0.0, min_bytes=0, disk=disk)
        try:
            with manager:
                loss = step.loss()
            return max(backward_flops(loss) - plain, 0.0)
        finally:
            manager.close()
