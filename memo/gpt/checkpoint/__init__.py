"""Checkpoints of a run: written completely or not at all, in the background, by one or many ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memo.lazy import attach

if TYPE_CHECKING:
    from memo.gpt.checkpoint.resharding import Resharding as Resharding, reshard as reshard
else:
    __getattr__, __dir__, __all__ = attach(__name__)
