"""Unmodified models of transformers over ranks: `memo.parallelize`, and the proof that their layers divide."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memo.lazy import attach

if TYPE_CHECKING:
    from memo.parallel.decoders.context import check_context as check_context
    from memo.parallel.decoders.parallel_model import parallelize as parallelize
    from memo.parallel.decoders.pipeline import DecoderPipeline as DecoderPipeline, whole_tensor as whole_tensor
else:
    __getattr__, __dir__, __all__ = attach(__name__)
