"""One published number and its prediction."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from benchmarks.published.rows import Row
from benchmarks.published.run import Fitted, Run


@dataclasses.dataclass(frozen=True, kw_only=True)
class Target:
    """A number of a row that can be predicted."""

    kind: str = ""
    """Class of cases that it belongs to, where a table has several."""
    table: str = ""
    """Tables of a GPU weigh the same in its fit, however many rows they have."""
    label: str
    quantity: str
    """Step s, peak GB, length, ..."""
    published: float
    gpu: str
    """Kind of GPU, whose rates are fitted together."""
    predict: Callable[[Fitted], float]
    work: Callable[[Fitted], float] | None = None
    """Seconds that the fit may take instead, proportional for small changes of rates; None where none depend on rates."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """A published table."""

    file: str
    title: str
    targets: Callable[[Row], Sequence[Target]]
    """The numbers of a row. Raises Inexpressible."""
    inputs: tuple[str, ...] = ()
    """Columns that say what ran. Rows that agree in all of them differ by what the table does not say."""
    whole: Callable[[Sequence[Row]], Sequence[Target]] | None = None
    """Numbers of the table as a whole; they are never fitted."""


def step_target(label: str, run: Run, published_s: float) -> Target:
    """Target of a run's step time."""
    return Target(
        label=label,
        quantity="step s",
        published=published_s,
        gpu=run.gpu,
        predict=lambda fitted: run.plan(fitted).step_s,
        work=run.work_s,
    )
