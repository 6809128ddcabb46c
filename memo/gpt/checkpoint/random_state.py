"""The random generators that a step draws from: read them, and put them back."""

from __future__ import annotations

import torch

__all__ = ["random_state", "set_random_state"]


def random_state() -> dict[str, torch.Tensor]:
    """Copies; of the GPU in use too, once one is."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, torch.Tensor]) -> None:
    """As `random_state` found them."""
    torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
