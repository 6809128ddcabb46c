"""One published number and its prediction."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.published.rows import Row
from benchmarks.published.run import Fitted, Run

__all__ = ["Table", "Target", "step_target"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """A number of a row that can be predicted."""

    label: str
    quantity: str
    """Step s, peak GB, length, ..."""
    published: float
    gpu: str
    """Kind of GPU, whose rates are fitted together."""
    predict: Callable[[Fitted], float]
    timed: bool = True
    """Whether it depends on rates, so that the fit may use it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """A published table."""

    file: str
    title: str
    targets: Callable[[Row], Sequence[Target]]
    """The numbers of a row. Raises Inexpressible."""
    whole: Callable[[Path], Sequence[str]] | None = None


def step_target(label: str, run: Run, published_s: float) -> Target:
    """Target of a run's step time."""
    return Target(
        label=label, quantity="step s", published=published_s, gpu=run.gpu, predict=lambda fitted: run.plan(fitted).step_s
    )
