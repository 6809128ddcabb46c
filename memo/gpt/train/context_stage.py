"""Stages of a run: steps at one sequence length, which a resumed run may change where positions are rotary.

Owns what a change of length means. Weights, AdamW's moments and the step number go on. The learning rate begins again:
warmup and decay of the new stage count from its first step. The loss guard forgets the losses of the other length. Batches
need nothing, since each is a function of the seed and the step. Every checkpoint has the first step of its stage, so a run
resumed within a stage has the same bits as an uninterrupted one.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from memo.errors import UsageError
from memo.gpt.checkpoint.directory import Checkpoint
from memo.gpt.optim.lr_schedule import LrSchedule
from memo.gpt.rope_scaling import RopeScaling
from memo.gpt.run_config import RunConfig
from memo.units import format_tokens

__all__ = ["Stage", "frequencies"]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """Steps of a run at one sequence length."""

    begin: int = 0
    """Steps done before it."""
    tokens: int = 0
    """Tokens trained on before it."""
    former_seq: int | None = None
    """Sequence length of the checkpoint, where this run begins the stage."""

    @classmethod
    def of(cls, config: RunConfig, start: Checkpoint | None) -> Stage:
        """Stage in which a run goes on from a checkpoint; None is a new run.

        Raises:
            UsageError: a new stage has no steps.
        """
        if start is None:
            return cls()
        former = start.settings
        known = cls(**former.get("stage", {}))
        seq = former.get("seq")
        if seq in (None, config.seq):
            return known
        if config.training.schedule.steps <= start.step:
            raise UsageError(
                f"--steps {config.training.schedule.steps}: {start.path} has {start.step} steps already, and --steps counts "
                f"them; give more to train at {format_tokens(config.seq)}"
            )
        rows = former["batch"] * former["training"]["accumulate"]
        return cls(
            begin=start.step, tokens=known.tokens + (start.step - known.begin) * rows * int(seq), former_seq=int(seq)
        )

    @property
    def is_new(self) -> bool:
        """True where this run changes the sequence length."""
        return self.former_seq is not None

    def schedule(self, config: RunConfig) -> LrSchedule:
        """Learning rate of the stage."""
        given = config.training.schedule
        warmup = LrSchedule.default_warmup(given.steps - self.begin) if config.auto_warmup else given.warmup
        return dataclasses.replace(given, begin=self.begin, warmup=warmup)

    def saved(self) -> dict[str, int]:
        """JSON values for a checkpoint."""
        return {"begin": self.begin, "tokens": self.tokens}

    def notes(self, config: RunConfig, former: dict[str, Any], now: dict[str, Any]) -> list[str]:
        """Lines for the terminal about a new stage.

        Args:
            config: the run.
            former: the checkpoint's model settings.
            now: those of the run.
        """
        if self.former_seq is None:
            return []
        schedule = self.schedule(config)
        lines = [
            f"stage    {format_tokens(self.former_seq)} to {format_tokens(config.seq)} tokens a row from step "
            f"{self.begin + 1} on, after {self.tokens:,} tokens",
            f"stage    learning rate warms up again for {schedule.warmup} steps to {schedule.peak:g}, and falls to "
            f"{schedule.floor:g} at step {schedule.steps}",
        ]
        before, after = _described(former), _described(now)
        if before != after:
            lines.append(f"stage    rotary positions: {before} before, {after} now")
        elif config.seq > self.former_seq:
            lines.append(
                f"warning  rotary positions as before ({after}): the model has not seen those from "
                f"{format_tokens(self.former_seq)} on; give --rope-theta or --rope-scaling"
            )
        return lines


def frequencies(config: RunConfig, start: Checkpoint | None) -> dict[str, Any]:
    """Rotary base and scaling of a run: those given, else the checkpoint's; None is the model's own."""
    former = {} if start is None else start.settings.get("model") or {}
    theta: float | None = config.rope_theta
    if theta is None and former.get("positions") == "rotary":
        theta = former.get("rope_theta")
    scaling = config.rope_scaling
    if scaling is None and former.get("rope_scaling"):
        scaling = RopeScaling(**former["rope_scaling"])
    return {"rope_theta": theta, "rope_scaling": None if scaling == "none" else scaling}


def _described(model: dict[str, Any]) -> str:
    scaling = model.get("rope_scaling")
    return f"theta {model.get('rope_theta'):g}, scaling {RopeScaling(**scaling) if scaling else 'none'}"
