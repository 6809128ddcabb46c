"""Training step on one device: forward, backward, gradient clipping, AdamW.

Owns the model, the optimizer and their state between steps. Does not own the batches (pure functions of the step
number), the offload manager (a context manager around forwards), files, or signals. Invariant: a step happens completely or
not at all; until the optimizer updates, an exception or a stop request leaves the state of the step before.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any, Protocol

import torch
from torch import nn

from memo.compression import CompressedGradients, ExchangeFigures
from memo.errors import TrainingDiverged
from memo.gpt.checkpoint.random_state import random_state, set_random_state
from memo.gpt.optim.host_optimizer import HostOptimizer
from memo.gpt.optim.loss_guard import LossGuard
from memo.gpt.optim.optimizer import adamw, empty_state
from memo.gpt.train.expert_rows import ExpertRows
from memo.gpt.train_config import Precision, TrainConfig


class BatchSource(Protocol):
    """Source of a step's tokens: deterministic and stateless."""

    def at(self, step: int, microbatch: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and targets of a microbatch, each int64 of shape (batch, seq)."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Result of one step."""

    step: int
    loss: float
    """Mean loss of the microbatches with the weights before the update; exactly the float32 value."""
    grad_norm: float
    """Norm of all gradients together, before clipping."""
    lr: float
    duration_s: float
    tokens: int
    alarm: str | None = None
    """Reason why the step is not normal."""
    skipped: bool = False
    """The update was skipped because of the alarm."""
    exchange: ExchangeFigures | None = None
    """Figures of the step's compressed exchange of gradients; None where it is exact."""
    expert_rows: ExpertRows | None = None
    """Rank whose experts got most rows; None without experts on other ranks."""


def weight_dtype(precision: Precision) -> torch.dtype:
    """Data type of the model's parameters."""
    return torch.bfloat16 if precision is Precision.BF16 else torch.float32


class Trainer:
    """Trains a model, step by step.

    Args:
        model: called with tokens and targets, returns the mean loss.
        batches: source of the steps' tokens.
        config: numbers of the step loop.
        device: the device of the model; batches are copied to it.
        around_forward: context manager entered for every forward pass, such as memo's manager; None is none.
        optimizer: AdamW on the host, of this model; None is AdamW on the device.
    """

    def __init__(
        self,
        model: nn.Module,
        batches: BatchSource,
        config: TrainConfig,
        *,
        device: torch.device,
        around_forward: AbstractContextManager[Any] | None = None,
        optimizer: HostOptimizer | None = None,
    ) -> None:
        self.model = model
        self.config = config
        self.device = device
        self.optimizer: torch.optim.AdamW | HostOptimizer = optimizer or adamw(
            model.parameters(), lr=config.schedule.peak, betas=config.betas, weight_decay=config.weight_decay
        )
        self.loss_guard = LossGuard(config.loss_guard)
        self._batches = batches
        self.compressed: CompressedGradients | None = None
        """Counters and state of compressed exchanges of gradients; None where they are exact."""
        self.around_forward = around_forward if around_forward is not None else nullcontext()
        """Context manager of every forward pass."""

    def step(self, step: int, *, stop: Callable[[], bool] = lambda: False) -> StepResult | None:
        """Runs one step.

        Args:
            step: number of the step, counted from 1.
            stop: asked before each microbatch; True ends the step with nothing changed.

        Returns:
            The result, or None if `stop` ended the step.

        Raises:
            TrainingDiverged: the loss or a gradient is not finite, or the loss jumped, and the policy is to stop; weights
                and RNG state are those of the step before.
        """
        begin = time.perf_counter()
        random = random_state()
        accumulated = self._gradients(step, stop)
        if accumulated is None:
            self._undo(random)
            return None
        loss, tokens = accumulated
        norm = self._clip()
        try:
            verdict = self.loss_guard.judge(step, loss, norm)
        except TrainingDiverged:
            self._undo(random)
            raise
        lr = self.config.schedule.at(step)
        if not verdict.skip:
            self._update(lr)
        self.optimizer.zero_grad(set_to_none=True)
        if isinstance(self.optimizer, HostOptimizer):
            self.optimizer.wait()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # the time of the last kernels belongs to this step
        return StepResult(
            step=step,
            loss=loss,
            grad_norm=norm,
            lr=lr,
            duration_s=time.perf_counter() - begin,
            tokens=tokens,
            alarm=verdict.alarm,
            skipped=verdict.skip,
            exchange=None if self.compressed is None else self.compressed.take_figures(self.device),
            expert_rows=self._expert_rows(),
        )

    def _expert_rows(self) -> ExpertRows | None:
        """Rank whose experts got most rows in the step; None without experts on other ranks."""
        return None

    def evaluate(self, batches: BatchSource) -> float:
        """Mean loss of `config.eval_steps` batches, without gradients, dropout or offloading."""
        self.model.eval()
        try:
            with torch.no_grad(), self._autocast():
                losses = [
                    float(self.model(*self._to_device(batches.at(index)))) for index in range(self.config.eval_steps)
                ]
        finally:
            self.model.train()
        return math.fsum(losses) / len(losses)

    def state(self) -> dict[str, Any]:
        """State of model and optimizer as nested dicts of tensors, which share memory with the live ones.

        Optimizer state is keyed by parameter name and does not depend on the order of the groups.
        """
        if not self.optimizer.state:
            empty_state(self.optimizer)
        names: dict[torch.Tensor, str] = {parameter: name for name, parameter in self.model.named_parameters()}
        return {
            "model": self.model.state_dict(),
            "optimizer": {names[parameter]: dict(state) for parameter, state in self.optimizer.state.items()},
        }

    def restored(self) -> None:
        """Notes that the tensors of `state` were changed from outside, as by loading a checkpoint."""
        if isinstance(self.optimizer, HostOptimizer):
            self.optimizer.take_parameters()

    def _gradients(self, step: int, stop: Callable[[], bool]) -> tuple[float, int] | None:
        total, tokens = torch.zeros((), device=self.device), 0
        for microbatch in range(self.config.accumulate):
            if stop():
                return None
            inputs, targets = self._to_device(self._batches.at(step, microbatch))
            with ExitStack() as contexts:
                contexts.enter_context(self.around_forward)
                contexts.enter_context(self._autocast())
                loss = self.model(inputs, targets)
            (loss / self.config.accumulate).backward()
            total += loss.detach()
            tokens += inputs.numel()
        return float(total / self.config.accumulate), tokens

    def _clip(self) -> float:
        limit = math.inf if self.config.clip is None else self.config.clip
        if isinstance(self.optimizer, HostOptimizer):
            return self.optimizer.clip(limit)
        return float(nn.utils.clip_grad_norm_(self.model.parameters(), limit))

    def _update(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        if self.compressed is not None:
            self.compressed.commit()

    def _undo(self, random: dict[str, torch.Tensor]) -> None:
        """Drops the gradients and restores the RNG state, so a checkpoint is bit-identical to the step before."""
        self.optimizer.zero_grad(set_to_none=True)
        set_random_state(random)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.config.precision is Precision.BF16_AUTOCAST:
            return torch.autocast(self.device.type, torch.bfloat16)
        return nullcontext()

    def _to_device(self, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, targets = batch
        return tokens.to(self.device), targets.to(self.device)
