"""Rotary position embedding (Su et al. 2021, "RoFormer"): tables once per forward, rotation per layer.

The two halves of a head are the real and imaginary parts, as Llama has them. Angles are made in float64: at a million
tokens a float32 angle is off by 0.06 radians, which is no position any more.
"""

from __future__ import annotations

import torch

__all__ = ["RotaryTables", "rotary_tables", "rotate", "tables_at"]

# cos and sin, each (tokens, 1, head size / 2), broadcasting over batch and heads.
RotaryTables = tuple[torch.Tensor, torch.Tensor]

# Tokens whose float64 angles exist at one time.
TABLE_CHUNK = 1 << 16


def rotary_tables(
    seq: int, head_dim: int, theta: float, *, device: torch.device, dtype: torch.dtype, first: int = 0
) -> RotaryTables:
    """cos and sin of position times theta^(-2i/d), in `dtype` but at least float32, for `seq` positions from `first`."""
    wide = torch.promote_types(dtype, torch.float32)
    exponent = torch.arange(0, head_dim, 2, device=device, dtype=torch.float64) / head_dim
    frequency = theta**-exponent
    cos = torch.empty(seq, 1, head_dim // 2, device=device, dtype=wide)
    sin = torch.empty_like(cos)
    for begin in range(0, seq, TABLE_CHUNK):
        end = min(begin + TABLE_CHUNK, seq)
        position = torch.arange(first + begin, first + end, device=device, dtype=torch.float64)
        angle = position[:, None, None] * frequency
        cos[begin:end] = angle.cos()
        sin[begin:end] = angle.sin()
    return cos, sin


def tables_at(tables: RotaryTables, positions: torch.Tensor) -> RotaryTables:
    """Tables of tokens that are not in order: cos and sin of `positions` (batch, tokens), with the batch in front."""
    cos, sin = tables
    return cos[positions], sin[positions]


def rotate(x: torch.Tensor, tables: RotaryTables) -> torch.Tensor:
    """x (batch, tokens, heads, head size) turned by its position; a new tensor, so the unturned one can go."""
    cos, sin = tables
    real, imaginary = x.chunk(2, dim=-1)
    turned = torch.cat((real * cos - imaginary * sin, imaginary * cos + real * sin), dim=-1)
    return turned.to(x.dtype)
