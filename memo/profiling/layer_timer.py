"""Times each layer's forward and backward, and what stands before and behind the layers, in steps that run for real.

The layers' own time only: its hooks run inside those of a manager, so waiting for copies is not in it. On a GPU the
device is waited for at every border, which makes the step slower and the parts right.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

__all__ = ["ClockedStep", "LayerTimer", "time_step"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ClockedStep:
    """One forward and backward, in seconds."""

    forward_s: tuple[float, ...]
    """Of each layer, in the order in which the layers are listed; backward likewise."""
    backward_s: tuple[float, ...]
    before_forward_s: float
    """Embedding; the next likewise. The last two are the head's and the loss's."""
    before_backward_s: float
    behind_forward_s: float
    behind_backward_s: float

    @classmethod
    def least(cls, steps: Sequence[ClockedStep]) -> ClockedStep:
        """The shortest time seen of each part: what disturbs a measurement only ever adds to it."""
        ends = ("before_forward_s", "before_backward_s", "behind_forward_s", "behind_backward_s")
        return cls(
            forward_s=tuple(min(times) for times in zip(*(step.forward_s for step in steps), strict=True)),
            backward_s=tuple(min(times) for times in zip(*(step.backward_s for step in steps), strict=True)),
            **{name: min(getattr(step, name) for step in steps) for name in ends},
        )


class LayerTimer:
    """Enter it around one forward and backward of a model whose layers each run once."""

    def __init__(self, layers: Sequence[nn.Module], device: torch.device) -> None:
        self._layers = layers
        self._device = device
        self._hooks: list[Any] = []
        self._marks: list[tuple[str, int, float]] = []

    def __enter__(self) -> LayerTimer:
        for number, layer in enumerate(self._layers):
            self._hooks += [
                layer.register_forward_pre_hook(self._marker("forward", number)),
                layer.register_forward_hook(self._marker("forward", number), prepend=True),
                layer.register_full_backward_pre_hook(self._marker("backward", number)),
                layer.register_full_backward_hook(self._marker("backward", number)),
            ]
        return self

    def __exit__(self, *exception: object) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def mark(self, what: str, number: int = -1) -> None:
        """Notes the time, when all work before it is done."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._marks.append((what, number, time.perf_counter()))

    def times(self) -> ClockedStep:
        """What was measured between the marks `begin`, `loss` and `end` and those of the layers."""
        at: dict[tuple[str, int], list[float]] = {}
        for what, number, moment in self._marks:
            at.setdefault((what, number), []).append(moment)
        count = len(self._layers)
        forward = [at["forward", number] for number in range(count)]
        backward = [at["backward", number] for number in range(count)]
        (begin,), (loss,), (end,) = at["begin", -1], at["loss", -1], at["end", -1]
        return ClockedStep(
            forward_s=tuple(span[-1] - span[0] for span in forward),
            backward_s=tuple(span[-1] - span[0] for span in backward),
            before_forward_s=min(span[0] for span in forward) - begin,
            before_backward_s=end - max(span[-1] for span in backward),
            behind_forward_s=loss - max(span[-1] for span in forward),
            behind_backward_s=min(span[0] for span in backward) - loss,
        )

    def _marker(self, what: str, number: int) -> Callable[..., None]:
        def mark(*_: object) -> None:
            self.mark(what, number)

        return mark


def time_step(loss: Callable[[], torch.Tensor], layers: Sequence[nn.Module], device: torch.device) -> ClockedStep:
    """One forward and backward."""
    with LayerTimer(layers, device) as clock:
        clock.mark("begin")
        value = loss()
        clock.mark("loss")
        value.backward()
        clock.mark("end")
    return clock.times()
