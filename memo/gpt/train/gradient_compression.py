"""Compressed exchange of gradients in a run: where it is possible, its setting, and its state in a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

from memo.compression import CompressionMethod
from memo.errors import UsageError

if TYPE_CHECKING:
    from memo.compression import CompressedGradients
    from memo.gpt.checkpoint.directory import Checkpoint
    from memo.gpt.run_config import RunConfig

STATE = "compressed_gradients"
"""Name of the state in a checkpoint."""
COMPRESSED_AT = "compressed_at"
"""Name of the setting that tells whose state it is; None without one."""


def require_replicas(config: RunConfig) -> None:
    """Raises UsageError where compression is asked for and no two ranks sum gradients."""
    if config.compress_gradients is not None and config.layout.dp * config.layout.cp == 1:
        raise UsageError(
            f"--compress-gradients {config.compress_gradients}: no two ranks have the same parameters; it takes data or "
            "context parallelism, --dp or --cp above 1 (what --tp, --pp and --ep exchange stays exact)"
        )


def state_settings(config: RunConfig, compressed: CompressedGradients | None) -> dict[str, str | None]:
    """Setting of a checkpoint: where the compression has a state, the layout and what each rank's has. A collective call."""
    method, layout = config.compress_gradients, config.layout
    if compressed is None or method is None or method.method is not CompressionMethod.POWERSGD:
        return {COMPRESSED_AT: None}
    sizes = ", ".join(f"{name} {getattr(layout, name)}" for name in ("dp", "cp", "tp", "pp", "ep"))
    return {COMPRESSED_AT: f"{method}, {sizes}, state {compressed.state_digest()}"}


def resumed_state(config: RunConfig, here: dict[str, str | None], start: Checkpoint) -> tuple[bool, list[str]]:
    """Whether a checkpoint has this run's error feedback, and a line where it has another's or none.

    Args:
        config: the run.
        here: its `state_settings`.
        start: the checkpoint.
    """
    if here[COMPRESSED_AT] is None:
        return False, []
    if start.settings.get(COMPRESSED_AT) == here[COMPRESSED_AT]:
        return True, []
    return False, [
        f"warning  the checkpoint has no error feedback of {config.compress_gradients} in this layout for these parameters; "
        "it begins at zero"
    ]
