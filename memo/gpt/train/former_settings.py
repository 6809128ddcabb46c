"""Settings of a checkpoint that a run goes on from: their check, and the differences to the run's.

Those that a run needs have the types that a run writes.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from memo.errors import CheckpointError, UsageError
from memo.gpt.checkpoint.directory import Checkpoint
from memo.gpt.optim import FLAGS
from memo.gpt.rope_scaling import RopeScaling, RopeScalingKind
from memo.gpt.train.gradient_compression import COMPRESSED_AT
from memo.units import format_tokens

if TYPE_CHECKING:
    from collections.abc import Iterator

GUARD = "health"
"""Key of the loss guard's state."""
_OF_BATCH = ("batch", "accumulate", "replicas", "drawn")  # batch_lines tells of them
_OF_POSITIONS = frozenset({"max_seq", "rope_theta", "rope_scaling"})  # rotary models may resume with others


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


def differences(start: Checkpoint | None, settings: dict[str, Any]) -> list[str]:
    """Warning for each setting that differs from the checkpoint's.

    Raises:
        CheckpointError: the checkpoint is of another model.
    """
    if start is None:
        return []
    former = start.settings
    was, now = dict(former.get("model") or {}), dict(settings["model"])
    changed = {key for key in now if was.get(key) != now[key]}
    if now["positions"] == "rotary":
        changed -= _OF_POSITIONS
    elif changed == {"max_seq"}:
        raise CheckpointError(
            f"{start.path} has learned positions for {format_tokens(was['max_seq'])} tokens, and --seq is "
            f"{format_tokens(now['max_seq'])}; only models with rotary positions (--variant llama) resume at another length"
        )
    if changed:
        listed = ", ".join(f"{key} {was.get(key)} there, {now[key]} here" for key in now if key in changed)
        raise CheckpointError(f"{start.path} is of another model: {listed}; give the same model options")
    others = (("seq", "model", COMPRESSED_AT, *_OF_BATCH), former, settings)
    return [
        *_other_positions(former, settings),
        *(
            f"warning  {flag_of_setting(key)} was {then} in the checkpoint and is {value} now"
            for key, then, value in _unequal(*others)
        ),
    ]


def positions(settings: dict[str, Any]) -> tuple[Any, ...]:
    """Length of a sequence, base and scaling of the rotary positions, from settings of a checkpoint."""
    model = settings.get("model") or {}
    return settings.get("seq"), model.get("rope_theta"), model.get("rope_scaling")


def _other_positions(former: dict[str, Any], settings: dict[str, Any]) -> list[str]:
    """Lines about sequences of another length than the checkpoint's."""
    (was_seq, *was), (seq, *now) = positions(former), positions(settings)
    if (was_seq, was) == (seq, now):
        return []
    lines = [f"context  {_described(was_seq, *was)} in the checkpoint, {_described(seq, *now)} now"]
    if was_seq is not None and seq > was_seq and was == now and settings["model"]["positions"] == "rotary":
        lines.append(
            f"warning  positions from {format_tokens(was_seq)} on were never trained; see --rope-theta and --rope-scaling"
        )
    return lines


def _described(seq: int | None, theta: float | None, scaling: dict[str, Any] | None) -> str:
    scaled = "" if scaling is None else f", {scaling['kind']}:{scaling['factor']:g}"
    base = "?" if theta is None else f"{theta:g}"
    return f"{'?' if seq is None else format_tokens(seq)} tokens (rope theta {base}{scaled})"


def _unequal(
    left_out: tuple[str, ...], former: dict[str, Any], now: dict[str, Any], within: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """Settings of two runs that differ, the inner ones of nested settings by themselves."""
    for key, value in now.items():
        then = former.get(key)
        if then == value or key in left_out:
            continue
        if isinstance(then, dict) and isinstance(value, dict):
            yield from _unequal(left_out, then, value, f"{within}{key}.")
        else:
            yield f"{within}{key}", then, value


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
