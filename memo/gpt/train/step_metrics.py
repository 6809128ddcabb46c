"""Measurement of a step's metrics: rates, utilisation, memory, and the bytes that the offload manager moved."""

from __future__ import annotations

import torch

from memo.allocator import memory_stats
from memo.gpt.arithmetic.flops import flops_per_token, recompute_flops_per_token
from memo.gpt.config import GPTConfig
from memo.gpt.train.metrics import StepMetrics, StepUsage
from memo.gpt.train.step import StepResult
from memo.gpt.train_config import Precision
from memo.machine import run_peak_rss_bytes
from memo.manager import Manager
from memo.mip.inputs import peak_flops
from memo.swap import Totals, total_host_bytes


class StepMeter:
    """Computes the metrics of each step from its result and the manager's counters.

    The counters are cumulative; the meter keeps their last reading.

    Args:
        shape: the model.
        seq: tokens of a sequence.
        device: the device whose memory is measured.
        precision: number format; decides whether the known peak applies.
        peak: peak FLOPs per second of one device; None looks the device up by name.
        manager: the offload manager; None without offloading.
        alpha: largest fraction that moves, where all layers have the same.
        devices: number of devices that share the run's tokens.
    """

    def __init__(
        self,
        shape: GPTConfig,
        *,
        seq: int,
        device: torch.device,
        precision: Precision,
        peak: float | None,
        manager: Manager | None,
        alpha: float | None = None,
        devices: int = 1,
    ) -> None:
        self._shape = shape
        self._seq = seq
        self._device = device
        one = peak if peak is not None else _known_peak(device, precision)
        self._peak = None if one is None else one * devices
        self._manager = manager
        self._alpha = alpha
        self._last = self._totals()

    def measure(
        self, result: StepResult, eval_loss: float | None = None, *, skipped_steps: int = 0
    ) -> tuple[StepMetrics, StepUsage]:
        """Metrics of the step since the last call, and the memory figures of its line of text."""
        now = self._totals()
        moved, self._last = now.since(self._last), now
        rate = result.tokens / result.duration_s
        model_full, model_causal, hardware = self._utilisation(rate, recomputed=moved.recomputed_bytes > 0)
        exchange = result.exchange
        rss, device_peak = run_peak_rss_bytes(), self._device_peak()
        metrics = StepMetrics(
            step=result.step,
            loss=result.loss,
            grad_norm=result.grad_norm,
            tokens_per_s=rate,
            mfu_causal=model_causal,
            mfu_full=model_full,
            hfu=hardware,
            peak_device_bytes=device_peak,
            peak_rss_bytes=rss,
            host_bytes=moved.host_bytes,
            disk_bytes=moved.disk_bytes,
            d2h_bytes_per_s=moved.moved_bytes / result.duration_s,
            h2d_bytes_per_s=moved.reloaded_bytes / result.duration_s,
            disk_bytes_per_s=moved.disk_bytes / result.duration_s,
            stall_s=moved.stall_s,
            recompute_s=moved.recompute_s,
            eval_loss=eval_loss,
            alarm=result.alarm,
            skipped_steps=skipped_steps,
            gradient_bytes=None if exchange is None else exchange.exact_bytes,
            gradient_sent_bytes=None if exchange is None else exchange.sent_bytes,
            gradient_error=None if exchange is None else exchange.largest_error,
            expert_rows=None if result.expert_rows is None else result.expert_rows.times,
        )
        usage = StepUsage(
            memory_bytes=rss if device_peak is None else device_peak,
            memory_total_bytes=self._memory_total(),
            offloads=self._manager is not None,
        )
        return metrics, usage

    def _totals(self) -> Totals:
        return Totals() if self._manager is None else Totals.of(self._manager.stats)

    def _utilisation(self, rate: float, *, recomputed: bool) -> tuple[float | None, float | None, float | None]:
        """Utilisations mfu_full, mfu_causal and hfu (`memo.gpt.arithmetic.flops`); None where not known."""
        peak = self._peak
        if peak is None:
            return None, None, None
        full, causal = (flops_per_token(self._shape, self._seq, causal=half) * rate / peak for half in (False, True))
        if not recomputed:
            return full, causal, causal
        if self._alpha is None:  # each layer has its own fraction, and the counters have no figures by layer
            return full, causal, None
        redone = recompute_flops_per_token(self._shape, 1 - self._alpha)
        return full, causal, causal + redone * rate / peak

    def _device_peak(self) -> int | None:
        return memory_stats(self._device).peak_device_bytes if self._device.type == "cuda" else None

    def _memory_total(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.get_device_properties(self._device).total_memory
        return total_host_bytes()


def _known_peak(device: torch.device, precision: Precision) -> float | None:
    """Peak FLOPs per second by GPU name. None for float32, whose peak depends on torch's TF32 setting."""
    if device.type != "cuda" or precision is Precision.FP32:
        return None
    return peak_flops(torch.cuda.get_device_name(device))
