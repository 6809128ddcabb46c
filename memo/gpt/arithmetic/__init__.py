"""Arithmetic model of a GPT: FLOPs, bytes and profile, without a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memo.lazy import attach

if TYPE_CHECKING:
    from memo.gpt.arithmetic.profile_by_arithmetic import Layout as Layout, derive_profile as derive_profile
else:
    __getattr__, __dir__, __all__ = attach(
        __name__,
        {
            "profile_by_arithmetic": "Layout derive_profile",
        },
    )
