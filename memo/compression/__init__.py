"""Compressed exchange of gradients between data-parallel ranks, by choice: int8 codes or low-rank factors (PowerSGD)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memo.lazy import attach

if TYPE_CHECKING:
    from memo.compression.attached import (
        CompressedGradients as CompressedGradients,
        compress_gradients as compress_gradients,
    )
    from memo.compression.method import (
        CompressionMethod as CompressionMethod,
        GradientCompression as GradientCompression,
    )
    from memo.compression.traffic import ExchangeFigures as ExchangeFigures
else:
    __getattr__, __dir__, __all__ = attach(__name__)
