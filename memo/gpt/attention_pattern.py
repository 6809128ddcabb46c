"""Pattern of full and local attention over the layers of a GPT. Needs no torch.

full_every 3    layer 0 local   1 local   2 full   3 local   4 local   5 full   ...
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any

from memo.errors import UsageError
from memo.units import parse_tokens

if TYPE_CHECKING:
    from memo.gpt.config import GPTConfig


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPattern:
    """Layers with local attention, also called sliding-window attention, beside layers with full attention.

    Raises:
        UsageError: a number is out of range.
    """

    window: Annotated[int, {"type": parse_tokens, "metavar": "TOKENS"}]
    """Tokens that a token of a layer with local attention attends to, such as 1k: itself and those before it. A window of at
    least the sequence is full attention."""
    full_every: int = 2
    """With --sliding-window: distance of the layers with full attention; the last of each N layers has it; 0: no
    layer has it."""

    def __post_init__(self) -> None:
        if self.window < 1:
            raise UsageError(f"--sliding-window {self.window} is less than 1 token; a token attends to itself at least")
        if self.full_every < 0:
            raise UsageError(f"--full-every {self.full_every} is negative; give 0 for no layer with full attention")

    def is_local(self, layer: int) -> bool:
        """Whether a layer, counted from 0, attends to a window."""
        return not self.full_every or layer % self.full_every != self.full_every - 1


def with_pattern(shape: GPTConfig, *, sliding_window: int | None = None, full_every: int | None = None) -> GPTConfig:
    """The shape with its pattern of attention changed, or with one.

    Args:
        shape: the model.
        sliding_window: tokens of the window; None is the model's.
        full_every: distance of the layers with full attention; None is the model's, else 2.

    Raises:
        UsageError: a number is out of range, or there is no window.
    """
    if shape.pattern is None and sliding_window is None:
        if full_every is not None:
            raise UsageError("--full-every has no meaning without --sliding-window")
        return shape
    given = {"window": sliding_window, "full_every": full_every}
    fields: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    pattern = AttentionPattern(**fields) if shape.pattern is None else dataclasses.replace(shape.pattern, **fields)
    return dataclasses.replace(shape, pattern=pattern)
