"""The GPT: its layers, attention, pipeline stages, and one rank's part of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memo.lazy import attach

if TYPE_CHECKING:
    from memo.gpt.model.build_rank import divided_stages as divided_stages, sharded_stages as sharded_stages
    from memo.gpt.model.experts import Experts as Experts
    from memo.gpt.model.model import GPT as GPT
else:
    __getattr__, __dir__, __all__ = attach(__name__)
