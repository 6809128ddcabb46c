"""The batch of a run that goes on from a checkpoint: kept over a change of ranks, and its rows with it.

A step is its rows and the learning rate. Other ranks divide the rows otherwise, and a step stays the same as long as all
its rows do; which rows they are is a function of the microbatches that the first run of a line of checkpoints had.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from memo.errors import UsageError
from memo.gpt.checkpoint.directory import Checkpoint, newest
from memo.gpt.run_config import RunConfig


def with_former_batch(config: RunConfig) -> RunConfig:
    """The run with as many sequences a step as the checkpoint that it goes on from, where no flag says how many.

    At another length a step is another one in any case, and the run is as the flags say. A data-parallel rank has at most
    as many in a microbatch as before, so that fewer ranks take more microbatches, not more memory.

    Raises:
        UsageError: the checkpoint's sequences do not divide over the data-parallel ranks.
        CheckpointError: the checkpoint that is named cannot be used.
    """
    if config.resume is None or not config.keeps_batch:
        return config
    former = _Former.of(former_settings(config))
    if former is None or former.seq != config.seq:
        return config
    ranks = config.layout.dp
    if former.step_rows % ranks:
        below = former.step_rows // ranks * ranks
        such = " or ".join(str(rows) for rows in (below, below + ranks) if rows)
        raise UsageError(
            f"--resume: a step of the checkpoint takes {former.step_rows} sequences, which do not divide over --dp {ranks}; "
            f"give --global-batch, such as {such}"
        )
    share = former.step_rows // ranks
    most = max(former.rows // former.replicas, 1)
    rows = next(count for count in range(min(most, share), 0, -1) if share % count == 0)
    training = dataclasses.replace(config.training, accumulate=share // rows)
    return dataclasses.replace(config, batch=rows * ranks, training=training)


def former_settings(config: RunConfig) -> dict[str, Any]:
    """Settings of the checkpoint that a run goes on from; empty where there is none.

    Raises:
        CheckpointError: the checkpoint that is named cannot be used.
    """
    if config.resume is None:
        return {}
    if config.resume != "latest":
        return Checkpoint.at(config.resume).settings
    assert config.checkpoint_dir is not None  # checked by RunConfig
    try:
        start = newest(config.checkpoint_dir)[0]
    except OSError:  # not there yet, or not to be read, which opening it says
        return {}
    return {} if start is None else start.settings


def drawn_rows(config: RunConfig, start: Checkpoint | None) -> int:
    """Rows of a microbatch as they are drawn: those of the first run, as long as a step takes as many rows."""
    former = None if start is None else _Former.of(start.settings)
    if former is None or former.seq != config.seq or former.step_rows != config.batch * config.training.accumulate:
        return config.batch
    return former.drawn


def batch_settings(config: RunConfig, drawn: int) -> dict[str, int]:
    """Settings of the batch that a checkpoint stores beside `batch` and the training's."""
    return {"replicas": config.layout.dp, "drawn": drawn}


def batch_lines(config: RunConfig, start: Checkpoint | None) -> list[str]:
    """Line about a step that is divided otherwise than the checkpoint's, or takes other rows."""
    former = None if start is None else _Former.of(start.settings)
    rows, count = config.batch, config.training.accumulate
    if former is None or (former.rows, former.count) == (rows, count):
        return []
    if former.step_rows == rows * count:
        assert start is not None
        data = None if config.data is None else [str(path) for path in config.data]
        chosen = {"seq": config.seq, "seed": config.seed, "data": data, "documents": config.documents}
        same = ", the same ones" if all(start.settings.get(key) == value for key, value in chosen.items()) else ""
        return [
            f"batch    {rows * count} sequences a step as in the checkpoint{same}: {count} x {rows} now, "
            f"{former.count} x {former.rows} there"
        ]
    return [
        f"warning  a step took {former.step_rows} sequences in the checkpoint ({former.count} x {former.rows}) and takes "
        f"{rows * count} now ({count} x {rows}), other ones; the learning rate is as given"
    ]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Former:
    """The batch of a checkpoint."""

    rows: int
    """In a microbatch of all ranks."""
    count: int
    """Microbatches of a step."""
    drawn: int
    """Rows of a microbatch as they are drawn."""
    replicas: int
    """Data-parallel ranks."""
    seq: object
    """Tokens of a sequence."""

    @classmethod
    def of(cls, settings: dict[str, Any]) -> _Former | None:
        """None where the settings are not those of a run."""
        training = settings.get("training")
        numbers: list[Any] = [settings.get(name) for name in ("batch", "drawn", "replicas")]
        numbers.append(training.get("accumulate") if isinstance(training, dict) else None)
        if not all(type(number) is int and number > 0 for number in numbers):
            return None
        rows, drawn, replicas, count = numbers
        drawn = drawn if rows * count % drawn == 0 else rows
        return cls(rows=rows, count=count, drawn=drawn, replicas=replicas, seq=settings.get("seq"))

    @property
    def step_rows(self) -> int:
        """Rows of a step."""
        return self.rows * self.count
