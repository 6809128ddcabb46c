"""Cross entropy of an output projection, computed over chunks of tokens so that the full logits never exist."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memo.lazy import attach

if TYPE_CHECKING:
    from memo.loss.chunked_cross_entropy import chunked_linear_cross_entropy as chunked_linear_cross_entropy
    from memo.loss.output_rows import (
        Vocabulary as Vocabulary,
        VocabularyShard as VocabularyShard,
        WholeVocabulary as WholeVocabulary,
    )
else:
    __getattr__, __dir__, __all__ = attach(
        __name__,
        {
            "chunked_cross_entropy": "chunked_linear_cross_entropy",
            "output_rows": "Vocabulary VocabularyShard WholeVocabulary",
        },
    )
