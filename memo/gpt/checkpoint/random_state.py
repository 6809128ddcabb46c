"""RNG state of torch's CPU and GPU generators: read and restored."""

from __future__ import annotations

import torch


def random_state() -> dict[str, torch.Tensor]:
    """Copies of the RNG states of the CPU and, once CUDA is initialised, of the current GPU."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def set_random_state(state: dict[str, torch.Tensor]) -> None:
    """Restores the result of `random_state`."""
    torch.set_rng_state(state["cpu"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
