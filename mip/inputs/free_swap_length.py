"""Sequence length from which swapping everything is free: saved bytes grow with it, attention's time with its square.

In the letters of MEMO (SIGMOD 2025, section 4.1), with S the bytes that a layer saves, B the link's rate and F its
forward time, full swap is hidden where S / B <= F, and on the way back where the same holds of its backward.
"""

from __future__ import annotations

import math

from memo.mip.inputs.hardware import Hardware
from memo.mip.inputs.profile import Profile


def free_swap_tokens(profile: Profile, machine: Hardware, *, ranks_per_node: int = 1) -> int | None:
    """Computes the shortest sequence from which every layer's whole activations are swapped behind compute.

    Batch, parallelism and machine stay as in the profile. Attention's backward is taken to last twice its forward,
    which is the least it can.

    Returns:
        Tokens of a sequence; None where no length suffices.
    """
    rates = machine.lanes(ranks_per_node)
    longest = 0.0
    for layer in profile.classes:
        moved = layer.full_bytes * (1 - layer.coded_share)
        encode_s, decode_s = (layer.coding.encode_s, layer.coding.decode_s) if layer.coding else (0.0, 0.0)
        forward = _multiple(moved, rates.d2h_bytes_per_s, layer.forward_s + encode_s, layer.attention_s)
        backward = _multiple(moved, rates.h2d_bytes_per_s, layer.backward_s + decode_s, 2 * layer.attention_s)
        longest = max(longest, forward, backward)
    return None if math.isinf(longest) else math.ceil(longest * profile.signature.tokens)


def _multiple(nbytes: float, bytes_per_s: float, seconds: float, attention_s: float) -> float:
    """The t > 0 with copy t = linear t + attention t^2: the length as a multiple of the profile's."""
    linear_s = seconds - attention_s
    copy_s = nbytes / bytes_per_s if bytes_per_s else math.inf
    if copy_s <= linear_s:
        return 0.0
    return (copy_s - linear_s) / attention_s if attention_s else math.inf
