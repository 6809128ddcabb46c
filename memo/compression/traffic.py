"""Counters of compressed exchanges on one rank: bytes sent, bytes that an exact exchange would send, largest error.

Bytes are those of ring algorithms among N ranks: an all-to-all or a reduce-scatter of B bytes sends (N - 1) / N of them,
an all-reduce twice as much. The error is that of what this rank sent, relative

    int8       to the largest magnitude of its group of 128 values, the largest of all values
    PowerSGD   to the 2-norm of its matrix with the error fed back, as a 2-norm, the largest of all matrices

Nothing here waits for the device until the figures are taken.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.distributed as dist

from memo.units import format_bytes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeFigures:
    """Figures of compressed exchanges over some time."""

    exact_bytes: int = 0
    """Bytes that this rank would have sent in exact exchanges."""
    sent_bytes: int = 0
    """Bytes that it sent."""
    largest_error: float = 0.0
    """Largest relative error of all ranks."""

    def __add__(self, other: ExchangeFigures) -> ExchangeFigures:
        return ExchangeFigures(
            exact_bytes=self.exact_bytes + other.exact_bytes,
            sent_bytes=self.sent_bytes + other.sent_bytes,
            largest_error=max(self.largest_error, other.largest_error),
        )

    def __str__(self) -> str:
        return (
            f"a rank sent {format_bytes(self.sent_bytes)} instead of {format_bytes(self.exact_bytes)}, "
            f"largest error {self.largest_error:.2%}"
        )


class GradientTraffic:
    """Counters since the last `take`."""

    def __init__(self) -> None:
        self._exact_bytes = 0
        self._sent_bytes = 0
        self._error: torch.Tensor | None = None

    def add_bytes(self, nbytes: int, *, exact: int) -> None:
        """Counts bytes of this rank, and those of an exact exchange."""
        self._sent_bytes += nbytes
        self._exact_bytes += exact

    def note_error(self, error: torch.Tensor) -> None:
        """Notes a relative error, a tensor of no dimensions; one that is not finite is none."""
        error = torch.nan_to_num(error, nan=0.0, posinf=0.0)
        self._error = error if self._error is None else torch.maximum(self._error, error)

    def take(self, device: torch.device) -> ExchangeFigures:
        """Figures since the last call, the error that of all ranks. A collective call of all ranks."""
        error = torch.zeros((), device=device) if self._error is None else self._error.float()
        dist.all_reduce(error, op=dist.ReduceOp.MAX)
        figures = ExchangeFigures(
            exact_bytes=self._exact_bytes, sent_bytes=self._sent_bytes, largest_error=float(error)
        )
        self._exact_bytes, self._sent_bytes, self._error = 0, 0, None
        return figures
