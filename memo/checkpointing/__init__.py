"""memo's engine without a model: `memo.saved_tensors` around any code, and `memo.checkpoint` in place of torch's."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memo.lazy import attach

if TYPE_CHECKING:
    from memo.checkpointing.context import SavedTensors as SavedTensors, saved_tensors as saved_tensors
    from memo.checkpointing.function import checkpoint as checkpoint
else:
    __getattr__, __dir__, __all__ = attach(__name__)
