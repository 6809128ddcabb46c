"""Check of a checkpoint's settings before a run reads them: those that it needs have the types that a run writes."""

from __future__ import annotations

import math
from typing import Any

from memo.errors import CheckpointError, UsageError
from memo.gpt.checkpoint.directory import Checkpoint
from memo.gpt.optim import FLAGS
from memo.gpt.rope_scaling import RopeScaling, RopeScalingKind

GUARD = "health"
"""Key of the loss guard's state."""


def flag_of_setting(setting: str) -> str:
    """The flag of `memo train` for a setting of a checkpoint, such as --steps for training.schedule.steps.

    The setting itself where it has none: AdamW's betas, and what the loss guard takes for a spike.
    """
    name = setting.rpartition(".")[2]
    if name == "betas" or (f".{GUARD}." in setting and name not in ("on_nan", "on_spike")):
        return setting
    return FLAGS.get(name, f"--{name.replace('_', '-')}")


def require_settings(start: Checkpoint) -> None:
    """Checks a checkpoint that a run goes on from.

    Raises:
        CheckpointError: its settings are not those of a run.
    """
    settings = start.settings
    model, guard = settings.get("model", {}), settings.get(GUARD, {})
    wrong = None
    if not isinstance(model, dict) or not isinstance(guard, dict):
        wrong = "model" if isinstance(guard, dict) else GUARD
    elif settings.get("seq") is not None and not _is_count(settings["seq"]):
        wrong = "seq"
    elif any(model.get(key) is not None and not _is_count(model[key]) for key in ("max_seq", "layers")):
        wrong = "model"
    elif model.get("rope_theta") is not None and not _is_number(model["rope_theta"]):
        wrong = "rope_theta"
    elif model.get("rope_scaling") is not None and not _is_scaling(model["rope_scaling"]):
        wrong = "rope_scaling"
    elif not _is_guard(guard):
        wrong = GUARD
    if wrong is not None:
        raise CheckpointError(f"{start.path} is not a checkpoint of memo train: its setting {wrong} is none")


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]


def _is_count(value: object) -> bool:
    return type(value) is int and value > 0


def _is_scaling(value: Any) -> bool:
    if not isinstance(value, dict) or value.keys() != {"kind", "factor", "original_seq"}:
        return False
    if not _is_number(value["factor"]) or not _is_count(value["original_seq"]) or not isinstance(value["kind"], str):
        return False
    try:
        RopeScaling(**{**value, "kind": RopeScalingKind(value["kind"])})
    except (UsageError, ValueError):
        return False
    return True


def _is_guard(state: dict[str, Any]) -> bool:
    losses = state.get("losses", [])
    counts = (state.get("skipped", 0), state.get("in_a_row", 0))
    return (
        isinstance(losses, list)
        and all(_is_number(loss) for loss in losses)
        and all(type(count) is int and count >= 0 for count in counts)
    )
