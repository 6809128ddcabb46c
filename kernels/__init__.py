"""Memory-bound work around the swap engine, each piece once in torch and once in Triton.

A public function here decides by the device of its tensors: CUDA where triton works runs the kernel, anything else runs
the torch reference beside it, which is also what the kernel is tested against. Triton is imported at the first launch and
never before. Modules named `*_triton` hold kernels and their launches; nothing but the module they belong to imports them.

    runs      how a strided view lies in memory: rows of contiguous runs
    staging   token ranges of several tensors into one contiguous block and back, exact or quantised on the way
    codec     the quantisation, its layout and its error bounds
    masks     0/1 masks, one bit an element
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memo.lazy import attach

if TYPE_CHECKING:
    from memo.kernels.masks import pack_mask as pack_mask, unpack_mask as unpack_mask
    from memo.kernels.staging import (
        pack_views as pack_views,
        places as places,
        staging_nbytes as staging_nbytes,
        unpack_views as unpack_views,
    )
else:
    __getattr__, __dir__, __all__ = attach(
        __name__,
        {
            "masks": "pack_mask unpack_mask",
            "staging": "pack_views places staging_nbytes unpack_views",
        },
    )
