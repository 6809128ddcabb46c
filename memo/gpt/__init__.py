"""The decoder-only GPT that memo trains: model, data, training loop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memo.lazy import attach

if TYPE_CHECKING:
    from memo.gpt.attention_pattern import AttentionPattern as AttentionPattern, with_pattern as with_pattern
    from memo.gpt.config import (
        MOE_FLAGS as MOE_FLAGS,
        PRESETS as PRESETS,
        GPTConfig as GPTConfig,
        MoeConfig as MoeConfig,
        Variant as Variant,
        preset as preset,
        preset_key as preset_key,
        preset_name as preset_name,
        with_experts as with_experts,
    )
    from memo.gpt.run_config import (
        EmbeddingGradients as EmbeddingGradients,
        OffloadConfig as OffloadConfig,
        OffloadMode as OffloadMode,
        RunConfig as RunConfig,
    )
    from memo.gpt.train_config import (
        GPU_PRECISION as GPU_PRECISION,
        Precision as Precision,
        TrainConfig as TrainConfig,
    )
else:
    __getattr__, __dir__, __all__ = attach(__name__)
