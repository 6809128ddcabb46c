"""Adaptation while training: ranks go on in another layout where measured times, links and memory say that it pays.

Where to begin: adaptation.py for when a layout is changed, prices.py for what other layouts would take.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memo.lazy import attach

if TYPE_CHECKING:
    from memo.adapt.adaptation import LayoutAdapter as LayoutAdapter
    from memo.adapt.restart import restart_rank as restart_rank
else:
    __getattr__, __dir__, __all__ = attach(__name__)
