"""From which sequence length swapping everything is free: a layer's bytes grow with it, attention's time with its square.

In the paper's letters (MEMO, SIGMOD 2025, section 4.1), with S the bytes that a layer saves, B the link's rate and F its
forward, full swap hides where S / B <= F; and on the way back where the same holds of its backward.
"""

from __future__ import annotations

import math

from memo.mip.hardware import Hardware
from memo.mip.profile import LayerProfile, Profile

__all__ = ["crossover_tokens"]


def crossover_tokens(profile: Profile, machine: Hardware, *, ranks_per_node: int = 1) -> int | None:
    """The shortest length from which every layer's whole activations leave and return behind compute.

    All else stays as in the profile: batch, parallelism, machine. What of a pass is attention is told by its share of
    forward's FLOPs, so the answer is exact for a profile of about that length. None: it never is.
    """
    rates = machine.lanes(ranks_per_node)
    longest = 0.0
    for layer in profile.classes:
        share = _attention_share(layer, machine)
        for seconds, rate in ((layer.forward_s, rates.d2h_bytes_per_s), (layer.backward_s, rates.h2d_bytes_per_s)):
            copy_s = layer.full_bytes / rate if rate else math.inf
            longest = max(longest, _multiple(copy_s, (1 - share) * seconds, share * seconds))
    return None if math.isinf(longest) else math.ceil(longest * profile.signature.tokens)


def _multiple(copy_s: float, linear_s: float, attention_s: float) -> float:
    """The t for which copy t = linear t + attention t^2."""
    if copy_s <= linear_s:
        return 0.0
    return (copy_s - linear_s) / attention_s if attention_s else math.inf


def _attention_share(layer: LayerProfile, machine: Hardware) -> float:
    """Of forward's time, each kind of FLOPs at the rate that the machine reaches in it."""
    attention = layer.attention_flops / machine.attention_efficiency
    rest = max(layer.forward_flops - layer.attention_flops, 0.0) / machine.matmul_efficiency
    return attention / (attention + rest) if attention else 0.0
