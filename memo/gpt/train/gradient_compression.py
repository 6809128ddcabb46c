"""Compressed exchange of gradients in a run: where it is possible, its setting, and its state in a checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from memo.compression import Method
from memo.errors import UsageError

if TYPE_CHECKING:
    from memo.gpt.checkpoint.directory import Checkpoint
    from memo.gpt.run_config import RunConfig

__all__ = ["STATE", "compression_settings", "require_replicas", "resumed_state"]

STATE = "compressed_gradients"
"""Name of the state in a checkpoint."""


def require_replicas(config: RunConfig) -> None:
    """Raises UsageError where compression is asked for and no two ranks sum gradients."""
    if config.compress_gradients is not None and config.layout.dp * config.layout.cp == 1:
        raise UsageError(
            f"--compress-gradients {config.compress_gradients}: no two ranks have the same parameters; it takes data or "
            "context parallelism, --dp or --cp above 1 (what --tp, --pp and --ep exchange stays exact)"
        )


def compression_settings(config: RunConfig) -> dict[str, Any]:
    """Setting of a checkpoint: the method, and where it has a state the layout, whose ranks have one each."""
    method, layout = config.compress_gradients, config.layout
    if method is None or method.method is not Method.POWERSGD:
        return {"compress_gradients": method and str(method), "compressed_at": None}
    ranks = f"dp {layout.dp}, cp {layout.cp}, tp {layout.tp}, pp {layout.pp}, ep {layout.ep}, stages {layout.stages}"
    if layout.stage_layers:
        ranks += f" of {','.join(map(str, layout.stage_layers))} layers"
    return {"compress_gradients": str(method), "compressed_at": ranks}


def resumed_state(config: RunConfig, start: Checkpoint | None) -> tuple[bool, list[str]]:
    """Whether a checkpoint has this run's error feedback, and a line where it has another's or none."""
    here = compression_settings(config)
    if start is None or here["compressed_at"] is None:
        return False, []
    if all(start.settings.get(name) == value for name, value in here.items()):
        return True, []
    return False, [
        "warning  the checkpoint has no error feedback for these ranks and this rank of powersgd; it begins at zero"
    ]
