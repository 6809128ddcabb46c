"""Attention of transformers' models as a GPU computes it: one fused kernel, without scores or masks in memory.

Owns an implementation of attention that transformers is told of by name. It drops masks, which fused kernels take as a rule
(causal, a window), and calls the model's own implementation for torch's kernel. What the rule was is noted on the module:
the window, and the bytes of queries, keys and values.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import nn

NAME = "memo_fused"
_NOTE = "_memo_attended"
_MASK_ARGUMENTS = ("sliding_window", "softcap", "s_aux", "position_bias", "output_attentions")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Attended:
    """One call of attention."""

    share: float
    """Scores that the window leaves, as a share of all that causality leaves."""
    entering_nbytes: int
    """Bytes of queries, keys and values."""
    leaving_nbytes: int
    """Bytes of the result."""


def register() -> None:
    """Makes the implementation known to transformers, as `attn_implementation=NAME`."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, _attend)
    AttentionMaskInterface.register(NAME, _no_mask)


def attended_in(layer: nn.Module) -> list[Attended]:
    """What the last forward of a layer noted."""
    return [vars(module)[_NOTE] for module in layer.modules() if _NOTE in vars(module)]


def _no_mask(*_: Any, **__: Any) -> None:
    return None


def _attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    window, tokens = options.get("sliding_window"), int(key.shape[-2])
    reach = min(int(window), tokens) / tokens if window else 1.0
    options = {name: given for name, given in options.items() if name not in _MASK_ARGUMENTS}
    options["dropout"] = 0.0  # a fused kernel draws again in backward, and saves no mask
    width = value.shape[-1]
    if width < key.shape[-1]:  # kernels want equal heads; flash attention's callers fill them up, too
        value = nn.functional.pad(value, [0, key.shape[-1] - width])
    out, _ = sdpa_attention_forward(module, query, key, value, None, **options)
    entering = sum(tensor.numel() * tensor.element_size() for tensor in (query, key, value))
    vars(module)[_NOTE] = Attended(
        share=2 * reach - reach**2, entering_nbytes=entering, leaving_nbytes=out.numel() * out.element_size()
    )
    return out[..., :width], None
