"""Metrics of a training step, as one JSON object per line of a file and as one line of text.

Invariant: the file has every step exactly once. A resumed run first removes the lines after its checkpoint, and a torn last
line; nothing else in the file is ever changed.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from memo.bounded_files import Refused, open_file, parse_object, text_of
from memo.errors import DataError, UsageError
from memo.units import format_bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """Metrics of one step. The fields are the keys of the JSON object; those with a default are there only when set."""

    step: int
    loss: float
    """null in the file where it is not finite; likewise `grad_norm`."""
    grad_norm: float
    tokens_per_s: float
    mfu_causal: float | None
    """None where the device's peak FLOPs are not known, as on a CPU; likewise `mfu_full` and `hfu`."""
    mfu_full: float | None
    hfu: float | None
    peak_device_bytes: int | None
    """Peak of the run so far, of which a planned allocator's arena counts whole; None on a CPU."""
    peak_rss_bytes: int
    """Peak of the run so far."""
    host_bytes: int
    """Bytes written to host memory in this step."""
    disk_bytes: int
    """Bytes written to disk in this step."""
    d2h_bytes_per_s: float
    """Bytes copied off the device, to host or disk, per second of the whole step, since copies overlap with compute."""
    h2d_bytes_per_s: float
    """Bytes copied back to the device, per second of the whole step."""
    disk_bytes_per_s: float
    """Bytes written to disk, per second of the whole step."""
    stall_s: float | None
    """None where device time is not measured; likewise `recompute_s`."""
    recompute_s: float | None
    eval_loss: float | None = None
    """Set for steps that are followed by an evaluation."""
    alarm: str | None = None
    """Reason why the step is not normal."""
    skipped_steps: int = 0
    """Updates skipped in the run so far."""
    gradient_bytes: int | None = None
    """Bytes that a rank sends in an exact exchange of gradients; set where it is compressed, likewise the two below."""
    gradient_sent_bytes: int | None = None
    """Bytes that the first rank sent instead."""
    gradient_error: float | None = None
    """Largest relative error of what ranks sent, as docs/parallel.md defines it."""
    expert_rows: float | None = None
    """Most rows that a rank's experts got, as a multiple of the mean of ranks; set where experts are on other ranks."""
    adaptation: dict[str, Any] | None = None
    """Decision on the layout after the step; set with --adapt where there was one."""

    def to_json(self) -> dict[str, Any]:
        """JSON object of the step, without fields that are not set."""
        line = dataclasses.asdict(self)
        for name in ("loss", "grad_norm"):
            if not math.isfinite(line[name]):
                line[name] = None  # JSON has no NaN
        for field in dataclasses.fields(self):
            if line[field.name] == field.default:
                del line[field.name]
        return line

    def to_line(self, usage: StepUsage) -> str:
        """Line of text for the terminal."""
        parts = [
            f"step {self.step}",
            f"loss {self.loss:.5f}",
            f"grad_norm {self.grad_norm:.3f}",
            f"memory {format_bytes(usage.memory_bytes)} {usage.memory_bytes / usage.memory_total_bytes:.0%}",
        ]
        if usage.offloads:
            parts += [
                f"host {format_bytes(self.host_bytes)}",
                f"nvme {format_bytes(self.disk_bytes)}",
                f"stall {_milliseconds(self.stall_s)}",
                f"recompute {_milliseconds(self.recompute_s)}",
            ]
        if self.gradient_bytes:
            parts.append(f"gradients {(self.gradient_sent_bytes or 0) / self.gradient_bytes:.1%}")
        if self.expert_rows is not None:
            parts.append(f"expert_rows {self.expert_rows:.2f}x")
        parts.append(f"tps {self.tokens_per_s:,.0f}")
        if self.mfu_causal is not None:
            parts.append(f"mfu_causal {self.mfu_causal:.1%}")
        if self.eval_loss is not None:
            parts.append(f"eval_loss {self.eval_loss:.5f}")
        if self.skipped_steps:
            parts.append(f"skipped {self.skipped_steps}")
        return "  ".join(parts)


def _milliseconds(seconds: float | None) -> str:
    return "not measured" if seconds is None else f"{seconds * 1e3:.0f} ms"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepUsage:
    """Memory figures that the line of text shows beyond the metrics."""

    memory_bytes: int
    """Peak so far of device memory, or of the process's memory on a CPU."""
    memory_total_bytes: int
    offloads: bool
    """True if an offload manager is active."""


class MetricsFile:
    """Appends metrics to a JSON-lines file. The file is created with its first line.

    Args:
        path: the file.
        after_step: step after which a resumed run continues, 0 included; None begins a new file.

    Raises:
        UsageError: a new run, and the file is not empty.
        DataError: the file cannot be written, or has a complete line that is not a step of memo train.
    """

    def __init__(self, path: Path, *, after_step: int | None = None) -> None:
        self.path = path
        self._file: IO[str] | None = None
        if path.is_dir():
            raise DataError(f"metrics file {path} is a directory; name a file")
        parent = path.parent
        if not os.access(path if path.exists() else parent, os.W_OK):
            raise DataError(f"cannot write metrics file {path}: {parent} is missing or not writable")
        if not path.exists():
            return
        if after_step is not None:
            self._cut_after(after_step)
        elif path.stat().st_size:
            raise UsageError(f"metrics file {path} already exists; remove it, choose another name, or --resume")

    def write(self, metrics: StepMetrics) -> None:
        """Appends one step and flushes it, so a killed run loses none.

        Raises:
            DataError: the file cannot be written.
        """
        try:
            if self._file is None:
                self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 - closed by close()
            self._file.write(json.dumps(metrics.to_json(), allow_nan=False) + "\n")
            self._file.flush()
        except OSError as error:
            raise DataError(f"cannot write metrics file {self.path}: {error.strerror}") from error

    def close(self) -> None:
        """Closes the file. Idempotent."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _cut_after(self, step: int) -> None:
        end = 0
        try:
            with open_file(self.path) as file:
                for line in file:
                    if not line.endswith(b"\n"):
                        break  # torn: the writer was killed
                    if _step_of(line) > step:
                        break
                    end += len(line)
            os.truncate(self.path, end)
        except (Refused, OSError) as error:
            raise DataError(
                f"{self.path} is not a metrics file of memo train ({error}); choose another name"
            ) from error


def _step_of(line: bytes) -> int:
    """The step of a line.

    Raises:
        Refused: it is no step of memo train.
    """
    step = parse_object(text_of(line)).get("step")
    if type(step) is not int:
        raise Refused("a line has no step")
    return step
