"""Interface between a run and what decides on its layout while it trains: a step that has ended, and the decision on it."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

    from memo.gpt.config import GPTConfig
    from memo.gpt.run_config import RunConfig
    from memo.gpt.train_config import Precision
    from memo.manager import Manager

ADAPTATION = "adaptation"
"""Key of an adapter's state among the settings of a checkpoint, and of a decision among metrics; cause of its note."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EndedStep:
    """A step that has ended, and what it was a step of."""

    step: int
    duration_s: float
    config: RunConfig
    shape: GPTConfig
    """The model, with the data's vocabulary."""
    precision: Precision
    device: torch.device
    manager: Manager | None
    """None without offloading."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LayoutDecision:
    """Decision to keep the layout or to change it, the same on all ranks."""

    changes: bool
    """True: the run ends after a checkpoint, to begin again in the layout of the adapter's state."""
    line: str
    """For the log and the trace."""
    figures: dict[str, Any]
    """JSON values for the metrics."""


class Adapter(Protocol):
    """Decides on the layout of a run while it trains."""

    def resumed(self, config: RunConfig, settings: dict[str, Any]) -> RunConfig:
        """The run in the layout that the settings of its checkpoint have from `state`, if any."""

    def consider(self, ended: EndedStep) -> LayoutDecision | None:
        """Decision after a step; None where there is nothing to decide. A collective call."""

    def state(self) -> dict[str, Any]:
        """JSON values that a checkpoint stores."""
