"""Planners on pure data: which activations to keep, move or recompute, and at which addresses. Imports no torch.

Where to begin:
    address/     buffers with lifetimes and sizes -> offsets. Read problem.py for the nouns, solver.py for the call,
                 checker.py for why a plan can be trusted.
    activation/  profile, hardware and budgets -> a plan for each layer: plan.py, solver.py, checker.py likewise.
    inputs/      the planners' inputs: profiles, hardware, pipeline schedules.
    simulate/    one training step played under an activation plan, event by event.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from memo.lazy import attach

if TYPE_CHECKING:
    from memo.mip.compile_cpp import build as build
    from memo.mip.strict_json import STDIN as STDIN, decode as decode, encode as encode
else:
    __getattr__, __dir__, __all__ = attach(__name__)
