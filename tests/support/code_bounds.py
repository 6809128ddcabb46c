"""Bounds of the error of codes of 8 bits."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from memo.kernels.codec import GROUP, SMALLEST, Codec


def error_bound(values: torch.Tensor, codec: Codec) -> torch.Tensor:
    """Returns the bound of |x' - x| for each finite value, by the formulas of `memo.kernels.codec`; float64."""
    wide = values.double()
    groups = F.pad(wide.abs(), (0, -wide.numel() % GROUP)).view(-1, GROUP)
    largest = groups.amax(dim=1).clamp(min=SMALLEST).repeat_interleave(GROUP)[: wide.numel()]
    if codec is Codec.INT8:
        coded = largest / 254
    else:
        coded = torch.maximum(wide.abs() / 16, largest / 448 / 1024)
    coded = coded * (1 + 2**-13)
    if values.dtype is torch.float32:
        return coded
    # Rounding of x' to the type of x: half a unit in the last place, subnormal values included.
    last = torch.finfo(values.dtype)
    return coded + torch.clamp((wide.abs() + coded) * last.eps / 2, min=last.smallest_normal * last.eps / 2)
