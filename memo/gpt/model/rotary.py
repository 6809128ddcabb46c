"""Rotary position embedding (Su et al. 2021, "RoFormer"): tables once per forward, rotation per layer.

The two halves of a head are the real and imaginary parts, as in Llama. Angles are computed in float64, since at a million
tokens a float32 angle is off by 0.06 radians.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from memo.gpt.rope_scaling import RopeScalingKind

if TYPE_CHECKING:
    from memo.gpt.rope_scaling import RopeScaling

# cos and sin, each (tokens, 1, head size / 2), broadcasting over batch and heads.
RotaryTables = tuple[torch.Tensor, torch.Tensor]

# Tokens whose float64 angles exist at once.
TABLE_CHUNK = 1 << 16


# Turns within the original length above which YaRN keeps a frequency, and below which it divides it (its section 3.2).
YARN_KEPT, YARN_DIVIDED = 32.0, 1.0


def rotary_tables(
    seq: int,
    head_dim: int,
    theta: float,
    *,
    device: torch.device,
    dtype: torch.dtype,
    first: int = 0,
    scaling: RopeScaling | None = None,
) -> RotaryTables:
    """Cosine and sine of position x theta^(-2i/d), Su et al. 2021.

    Args:
        seq: number of positions.
        head_dim: head size d.
        theta: base of the frequencies.
        device: device of the tables.
        dtype: data type of the tables; half precision gives float32.
        first: first position.
        scaling: change of the frequencies for longer sequences.

    Returns:
        Two tensors of shape (seq, 1, head_dim / 2).
    """
    wide = torch.promote_types(dtype, torch.float32)
    frequency, length = _frequencies(head_dim, theta, scaling, device)
    cos = torch.empty(seq, 1, head_dim // 2, device=device, dtype=wide)
    sin = torch.empty_like(cos)
    for begin in range(0, seq, TABLE_CHUNK):
        end = min(begin + TABLE_CHUNK, seq)
        position = torch.arange(first + begin, first + end, device=device, dtype=torch.float64)
        angle = position[:, None, None] * frequency
        cos[begin:end] = angle.cos() * length
        sin[begin:end] = angle.sin() * length
    return cos, sin


def _frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None, device: torch.device
) -> tuple[torch.Tensor, float]:
    """Radians from one position to the next, float64 (head_dim / 2,), and the length of a rotated unit vector."""
    exponent = torch.arange(0, head_dim, 2, device=device, dtype=torch.float64) / head_dim
    if scaling is not None and scaling.kind is RopeScalingKind.NTK and head_dim > 2:
        theta *= scaling.factor ** (head_dim / (head_dim - 2))
    frequency = theta**-exponent
    if scaling is None or scaling.kind is RopeScalingKind.NTK:
        return frequency, 1.0
    if scaling.kind is RopeScalingKind.LINEAR:
        return frequency / scaling.factor, 1.0

    def pair_with(turns: float) -> float:
        """Number of the pair, as a fraction, that turns so often within the original length."""
        return head_dim * math.log(scaling.original_seq / (turns * 2 * math.pi)) / (2 * math.log(theta))

    # The ramp runs over numbers of pairs, from one whole number to another, as in the authors' code.
    low = max(math.floor(pair_with(YARN_KEPT)), 0)
    high = min(math.ceil(pair_with(YARN_DIVIDED)), head_dim - 1)
    pair = torch.arange(head_dim // 2, device=device, dtype=torch.float64)
    divided = ((pair - low) / max(high - low, 0.001)).clamp(0, 1)
    return frequency * (1 - divided) + frequency / scaling.factor * divided, 0.1 * math.log(scaling.factor) + 1.0


def tables_at(tables: RotaryTables, positions: torch.Tensor) -> RotaryTables:
    """Table rows of `positions` (batch, tokens), as tables of shape (batch, tokens, 1, head size / 2)."""
    cos, sin = tables
    return cos[positions], sin[positions]


def rotate(x: torch.Tensor, tables: RotaryTables) -> torch.Tensor:
    """Rotates `x` (batch, tokens, heads, head size) by its positions, into a new tensor of the same dtype.

    Heads may be in groups: (batch, tokens, groups, heads, head size).
    """
    cos, sin = (table.unsqueeze(-2) for table in tables) if x.dim() == 5 else tables
    real, imaginary = x.chunk(2, dim=-1)
    # Each half is rounded by itself, and no product is kept beside the sum: at a million tokens one is several GiB.
    first = torch.addcmul(real * cos, imaginary, sin, value=-1).to(x.dtype)
    return torch.cat((first, torch.addcmul(imaginary * cos, real, sin).to(x.dtype)), dim=-1)
