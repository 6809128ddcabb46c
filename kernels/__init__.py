"""Memory-bound kernels for the swap engine, each with a torch reference and a Triton implementation.

Public functions dispatch by device: CUDA tensors run the Triton kernel where Triton works; all others run the torch
reference, which is also the kernel's test oracle. Triton is imported at the first launch, not before. A module
`x_triton` holds the kernels and launches of module `x`, which alone imports it.

    codec          one-byte codes of floats, their layout and error bounds
    masks          0/1 masks, one bit per element
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memo.lazy import attach

if TYPE_CHECKING:
    from memo.kernels.codec import (
        ALIGNMENT as ALIGNMENT,
        GROUP as GROUP,
        VALUES as VALUES,
        Codec as Codec,
        coded_error as coded_error,
        decode as decode,
        encode as encode,
    )
    from memo.kernels.masks import pack_mask as pack_mask, unpack_mask as unpack_mask
else:
    __getattr__, __dir__, __all__ = attach(__name__)
