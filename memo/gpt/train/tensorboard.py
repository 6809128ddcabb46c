"""TensorBoard output: the metrics of each step, under the names of the metrics file."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType

from memo.errors import DataError, UsageError
from memo.gpt.train.metrics import StepMetrics

GROUPS = {
    "loss": "training",
    "eval_loss": "training",
    "grad_norm": "training",
    "tokens_per_s": "speed",
    "mfu_causal": "speed",
    "mfu_full": "speed",
    "hfu": "speed",
    "recompute_s": "speed",
    "peak_device_bytes": "memory",
    "peak_rss_bytes": "memory",
    "host_bytes": "links",
    "disk_bytes": "links",
    "d2h_bytes_per_s": "links",
    "h2d_bytes_per_s": "links",
    "disk_bytes_per_s": "links",
    "stall_s": "links",
    "gradient_bytes": "links",
    "gradient_sent_bytes": "links",
    "gradient_error": "training",
    "expert_rows": "training",
}


class TensorBoard:
    """Writes event files. A resumed run hides the steps that the former run wrote after its checkpoint.

    Args:
        folder: directory of the event files.
        done: steps done before this run.

    Raises:
        UsageError: the tensorboard package is not installed.
        DataError: the folder cannot be written to.
    """

    def __init__(self, folder: Path, *, done: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise UsageError("--tensorboard needs the tensorboard package; pip install tensorboard") from error
        try:
            self._writer = SummaryWriter(folder, purge_step=done + 1 if done else None, flush_secs=10)
        except OSError as error:
            raise DataError(f"cannot write TensorBoard files to {folder}: {error.strerror or error}") from error

    def write(self, metrics: StepMetrics) -> None:
        """Writes one step, without figures that are None."""
        for name, value in metrics.to_json().items():
            if name in GROUPS and value is not None:
                self._writer.add_scalar(f"{GROUPS[name]}/{name}", value, metrics.step)

    def close(self) -> None:
        """Closes the event file. Idempotent."""
        self._writer.close()

    def __enter__(self) -> TensorBoard:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
