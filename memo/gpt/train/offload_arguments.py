"""The offload manager of a run: from what the person asked for to the arguments of `memo.offload`."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed import ProcessGroup

from memo.errors import UsageError
from memo.gpt.run_config import OffloadConfig, OffloadMode
from memo.manager import Manager, offload

__all__ = ["open_manager"]


def open_manager(
    config: OffloadConfig,
    model: nn.Module,
    device: torch.device,
    *,
    layers: Sequence[nn.Module] | None = None,
    group: ProcessGroup | None = None,
    schedule: Any = None,
) -> Manager | None:
    """The manager, which the caller closes; None for mode none.

    `layers` where the model does not show them itself; `group` and `schedule` as `memo.offload` takes them.
    """
    if config.mode is OffloadMode.NONE:
        return None
    return offload(
        model,
        plan=config.plan,
        device=config.device_budget,
        # Who names a tier wants everything there; who leaves the choice to memo gets a plan.
        alpha=1.0 if config.alpha is None and config.mode is not OffloadMode.AUTO else config.alpha,
        exact=config.exact,
        disk_budget=config.disk_budget,
        layers=layers,
        trace=config.trace,
        group=group,
        schedule=schedule,
        **_tiers(config, device),
    )


def _tiers(config: OffloadConfig, device: torch.device) -> dict[str, Any]:
    """`host` and `disk`. On a CPU run host memory is the device, so it is a tier only with an explicit budget."""
    budget = config.host_budget
    if config.mode is OffloadMode.HOST:
        if budget is None and device.type == "cpu":
            raise UsageError("--offload host on a CPU needs --host-budget: host memory is the device there")
        return {"host": "auto" if budget is None else budget, "disk": None}
    if config.mode is OffloadMode.DISK:
        return {"host": budget or 0, "disk": config.disk_dir or Path(tempfile.gettempdir())}
    return {"host": "auto" if budget is None else budget, "disk": config.disk_dir}
