"""Rotary position embedding (Su et al. 2021, "RoFormer"): tables once per forward, rotation per layer.

The two halves of a head are the real and imaginary parts, as in Llama. Angles are computed in float64, since at a million
tokens a float32 angle is off by 0.06 radians.
"""

from __future__ import annotations

import torch

from memo.gpt.rope_scaling import RopeScaling

__all__ = ["RotaryTables", "rotary_tables", "rotate", "tables_at"]

# cos and sin, each (tokens, 1, head size / 2), broadcasting over batch and heads.
RotaryTables = tuple[torch.Tensor, torch.Tensor]

# Tokens whose float64 angles exist at once.
TABLE_CHUNK = 1 << 16


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
        scaling: other frequencies and a factor of both tables, for a longer context; None is neither.

    Returns:
        Two tensors of shape (seq, 1, head_dim / 2).
    """
    wide = torch.promote_types(dtype, torch.float32)
    exponent = torch.arange(0, head_dim, 2, device=device, dtype=torch.float64) / head_dim
    frequency = theta**-exponent
    if scaling is not None:
        frequency = torch.tensor(scaling.frequencies(head_dim, theta), device=device, dtype=torch.float64)
    cos = torch.empty(seq, 1, head_dim // 2, device=device, dtype=wide)
    sin = torch.empty_like(cos)
    for begin in range(0, seq, TABLE_CHUNK):
        end = min(begin + TABLE_CHUNK, seq)
        position = torch.arange(first + begin, first + end, device=device, dtype=torch.float64)
        angle = position[:, None, None] * frequency
        cos[begin:end] = angle.cos()
        sin[begin:end] = angle.sin()
    if scaling is not None and scaling.magnitude != 1.0:
        cos *= scaling.magnitude
        sin *= scaling.magnitude
    return cos, sin


def tables_at(tables: RotaryTables, positions: torch.Tensor) -> RotaryTables:
    """Table rows of `positions` (batch, tokens), as tables of shape (batch, tokens, 1, head size / 2)."""
    cos, sin = tables
    return cos[positions], sin[positions]


def rotate(x: torch.Tensor, tables: RotaryTables) -> torch.Tensor:
    """Rotates `x` (batch, tokens, heads, head size) by its positions, into a new tensor of the same dtype."""
    cos, sin = tables
    real, imaginary = x.chunk(2, dim=-1)
    rotated = torch.cat((real * cos - imaginary * sin, imaginary * cos + real * sin), dim=-1)
    return rotated.to(x.dtype)
