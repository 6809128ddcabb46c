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


class LayerTimer:
    """Context manager that times one forward and backward of a model whose layers each run once.

    The caller marks "begin", "loss" (the forward has ended) and "end".

    Args:
        layers: the layers, in any order; times are in the same order.
        device: on "cuda" each mark waits for the device.
    """

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
        """Records the time at which all work issued so far is done."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._marks.append((what, number, time.perf_counter()))

    def times(self) -> TimedStep:
        """Returns the times between the marks.

        Raises:
            KeyError: a layer did not run forward and backward.
        """
        at: dict[tuple[str, int], list[float]] = {}
        for what, number, moment in self._marks:
            at.setdefault((what, number), []).append(moment)
        count = len(self._layers)
        forward = [at["forward", number] for number in range(count)]
        backward = [at["backward", number] for number in range(count)]
        (begin,), (loss,), (end,) = at["begin", -1], at["loss", -1], at["end", -1]
        return TimedStep(
            forward_s=tuple(span[-1] - span[0] for span in forward),
            backward_s=tuple(span[-1] - span[0] for span in backward),
            embedding_forward_s=min(span[0] for span in forward) - begin,
            embedding_backward_s=end - max(span[-1] for span in backward),
            head_forward_s=loss - max(span[-1] for span in forward),
            head_backward_s=min(span[0] for span in backward) - loss,
        )

    def _marker(self, what: str, number: int) -> Callable[..., None]:
        def mark(*_: object) -> None:
            self.mark(what, number)

        return mark


def time_step(loss: Callable[[], torch.Tensor], layers: Sequence[nn.Module], device: torch.device) -> TimedStep:
    """Runs and times one forward (`loss`) and backward."""
    with LayerTimer(layers, device) as timer:
        timer.mark("begin")
        value = loss()
        timer.mark("loss")
        value.backward()
        timer.mark("end")
    return timer.times()
