"""Cross entropy of an output projection, computed over chunks of tokens so that the full logits never exist."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memo.lazy import attach

if TYPE_CHECKING:
    from memo.loss.chunked_cross_entropy import chunked_linear_cross_entropy as chunked_linear_cross_entropy
    from memo.loss.chunks import (
        LOGIT_NBYTES as LOGIT_NBYTES,
        added_nbytes as added_nbytes,
        chunk_tokens as chunk_tokens,
        moved_nbytes as moved_nbytes,
    )
    from memo.loss.output_rows import (
        Vocabulary as Vocabulary,
        VocabularyShard as VocabularyShard,
        WholeVocabulary as WholeVocabulary,
    )
    from memo.loss.without_logits import loss_without_logits as loss_without_logits
else:
    __getattr__, __dir__, __all__ = attach(__name__)
