"""Timer of each layer's forward and backward, of the embedding and of the head, in real steps.

Measures the layers' own time: its hooks run inside those of a manager, so waits for copies are not included. On a GPU
it waits for the device at every boundary, which makes the step slower and the parts right.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TimedStep:
    """Seconds of the parts of one forward and backward."""

    forward_s: tuple[float, ...]
    """Forward of each layer, in the order of the layers."""
    backward_s: tuple[float, ...]
    """Backward of each layer, in the order of the layers."""
    embedding_forward_s: float
    """Before the first layer's forward."""
    embedding_backward_s: float
    """After the first layer's backward."""
    head_forward_s: float
    """After the last layer's forward, the loss included."""
    head_backward_s: float
    """Before the last layer's backward, the loss included."""

    @classmethod
    def least(cls, steps: Sequence[TimedStep]) -> TimedStep:
        """Takes the shortest time of each part: a disturbance only makes a part longer."""
        ends = ("embedding_forward_s", "embedding_backward_s", "head_forward_s", "head_backward_s")
        return cls(
            forward_s=tuple(min(times) for times in zip(*(step.forward_s for step in steps), strict=True)),
            backward_s=tuple(min(times) for times in zip(*(step.backward_s for step in steps), strict=True)),
            **{name: min(getattr(step, name) for step in steps) for name in ends},
        )


def time_step(loss: Callable[[], torch.Tensor], layers: Sequence[nn.Module], device: torch.device) -> TimedStep:
    """Runs and times one forward (`loss`) and backward of a model whose layers each run once.

    Args:
        loss: runs the forward.
        layers: the layers, in any order; times are in the same order.
        device: on "cuda" each mark waits for the device.

    Raises:
        KeyError: a layer did not run forward and backward.
    """
    at: dict[tuple[str, int], list[float]] = {}

    def now() -> float:
        """The time at which all work issued so far is done."""
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    def marker(what: str, number: int) -> Callable[..., None]:
        return lambda *_: at.setdefault((what, number), []).append(now())

    hooks: list[Any] = []
    try:
        for number, layer in enumerate(layers):
            hooks += [
                layer.register_forward_pre_hook(marker("forward", number)),
                layer.register_forward_hook(marker("forward", number), prepend=True),
                layer.register_full_backward_pre_hook(marker("backward", number)),
                layer.register_full_backward_hook(marker("backward", number)),
            ]
        begin = now()
        value = loss()
        turn = now()
        value.backward()
        end = now()
    finally:
        for hook in hooks:
            hook.remove()
    forward, backward = ([at[way, number] for number in range(len(layers))] for way in ("forward", "backward"))
    return TimedStep(
        forward_s=tuple(span[-1] - span[0] for span in forward),
        backward_s=tuple(span[-1] - span[0] for span in backward),
        embedding_forward_s=min(span[0] for span in forward) - begin,
        embedding_backward_s=end - max(span[-1] for span in backward),
        head_forward_s=turn - max(span[-1] for span in forward),
        head_backward_s=min(span[0] for span in backward) - turn,
    )
