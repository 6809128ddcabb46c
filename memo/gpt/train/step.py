"""One training step after another: forward, backward, clip, AdamW.

Owns the model, the optimizer and their state between steps. Does not own the batches (pure functions of the step
number), the offload manager (a context manager around forwards), files, or signals. A step either happens whole or not
at all: until the optimizer moves, an exception or a stop request leaves the state of the step before.
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

from memo.errors import TrainingDiverged
from memo.gpt.checkpoint.random_state import random_state, set_random_state
from memo.gpt.optim.loss_guard import LossGuard
from memo.gpt.optim.optimizer import adamw, empty_state
from memo.gpt.train_config import Precision, TrainConfig

__all__ = ["BatchSource", "StepResult", "Trainer", "weight_dtype"]


class BatchSource(Protocol):
    """Where a step's tokens come from: deterministic, without state."""

    def at(self, step: int, microbatch: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and targets, int64, (batch, seq)."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one step did."""

    step: int
    loss: float
    """Mean over the microbatches, of the weights before the update; the float32 value, exactly."""
    grad_norm: float
    """Before clipping."""
    lr: float
    duration_s: float
    tokens: int
    alarm: str | None = None
    """What was wrong with this step, in words."""
    skipped: bool = False
    """Its update was not made, because of the alarm."""


def weight_dtype(precision: Precision) -> torch.dtype:
    """The type to make the model in."""
    return torch.bfloat16 if precision is Precision.BF16 else torch.float32


class Trainer:
    """Steps a model. `around_forward` is entered anew for every forward of a step, for instance memo's manager."""

    def __init__(
        self,
        model: nn.Module,
        batches: BatchSource,
        config: TrainConfig,
        *,
        device: torch.device,
        around_forward: AbstractContextManager[Any] | None = None,
    ) -> None:
        self.model = model
        self.config = config
        self.device = device
        self.optimizer = adamw(model, lr=config.schedule.peak, betas=config.betas, weight_decay=config.weight_decay)
        self.loss_guard = LossGuard(config.loss_guard)
        self._batches = batches
        self.around_forward = around_forward if around_forward is not None else nullcontext()
        """What every forward runs in."""

    def step(self, step: int, *, stop: Callable[[], bool] = lambda: False) -> StepResult | None:
        """Runs step `step` (from 1); None if `stop` said so between two microbatches, with nothing changed.

        Raises:
            TrainingDiverged: the loss or a gradient is not finite, or the loss jumped, and the policy is to stop; weights
                and random generators are those of the step before.
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
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # else the time of the last kernels would count for the next step
        return StepResult(
            step=step,
            loss=loss,
            grad_norm=norm,
            lr=lr,
            duration_s=time.perf_counter() - begin,
            tokens=tokens,
            alarm=verdict.alarm,
            skipped=verdict.skip,
        )

    def evaluate(self, batches: BatchSource) -> float:
        """Mean loss over `config.eval_steps` batches, without gradients, dropout or offload."""
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
        """Everything the next step depends on, as tensors that share memory with the live ones, in nested dicts.

        Optimizer state is keyed by parameter name, so that it does not depend on the order of groups.
        """
        if not self.optimizer.state:
            empty_state(self.optimizer)
        names: dict[torch.Tensor, str] = {parameter: name for name, parameter in self.model.named_parameters()}
        return {
            "model": self.model.state_dict(),
            "optimizer": {names[parameter]: dict(state) for parameter, state in self.optimizer.state.items()},
        }

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
        return float(nn.utils.clip_grad_norm_(self.model.parameters(), limit))

    def _update(self, lr: float) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()

    def _undo(self, random: dict[str, torch.Tensor]) -> None:
        """The step did not happen: a checkpoint of now is one of the step before, to the last bit."""
        self.optimizer.zero_grad(set_to_none=True)
        set_random_state(random)

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.config.precision is Precision.BF16_AUTOCAST:
            return torch.autocast(self.device.type, torch.bfloat16)
        return nullcontext()

    def _to_device(self, batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, targets = batch
        return tokens.to(self.device), targets.to(self.device)
